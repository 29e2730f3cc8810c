"""The SeqIO task over `stdlib_text`: bytes of Python source, in pieces that can be packed."""

from __future__ import annotations

from collections.abc import Mapping

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from configs import stdlib_text

__all__ = ['TASK_NAME', 'VOCABULARY']

TASK_NAME = 'stdlib_lm'
VOCABULARY = seqio.ByteVocabulary()
# Pieces, not files, are shuffled; this many of them (about 6 MB of text) are drawn from.
SHUFFLE_BUFFER_SIZE = 20_000


class StdlibSource(seqio.TfdsDataSource):
  """Reads `stdlib_text`, building it first where that isn't done yet.

  Nothing is built or read before a data set is asked for, so that experiments can be imported,
  listed and checked for free.
  """

  def __init__(self):
    super().__init__(
        tfds_name=f'{stdlib_text.NAME}:{stdlib_text.DATA_VERSION}', splits=['train', 'test']
    )
    self._builder: stdlib_text.StdlibText | None = None

  @property
  def builder(self) -> stdlib_text.StdlibText:
    """The data set on disk."""
    if self._builder is None:
      self._builder = stdlib_text.prepare()
    return self._builder

  def get_dataset(
      self,
      split: str = 'train',
      shuffle: bool = True,
      seed: int | None = None,
      shard_info: seqio.ShardInfo | None = None,
      **unused,
  ) -> tf.data.Dataset:
    """Returns the files of a split, as {'path', 'text'}.

    The parent class would look for the data set in TFDS's public bucket at each call, which takes
    long on a machine without a network.
    """
    del unused
    read_config: tfds.ReadConfig = self.tfds_dataset.read_config
    read_config.shuffle_seed = seed
    read_config.skip_prefetch = True
    read_config.input_context = None
    if shard_info is not None:
      read_config.input_context = tf.distribute.InputContext(
          num_input_pipelines=shard_info.num_shards, input_pipeline_id=shard_info.index
      )
    return self.builder.as_dataset(split=split, shuffle_files=shuffle, read_config=read_config)

  def num_input_examples(self, split: str) -> int:
    """Returns the number of files in a split."""
    return self.builder.info.splits[split].num_examples

  def list_shards(self, split: str) -> list[str]:
    """Returns the files on disk that hold a split."""
    return [shard.filename for shard in self.builder.info.splits[split].file_instructions]


def split_at_blank_lines(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Turns each file into pieces of source separated by blank lines: {'targets': text}."""

  def pieces(example: Mapping[str, tf.Tensor]) -> tf.data.Dataset:
    texts = tf.strings.split(example['text'], sep='\n\n')
    texts = tf.boolean_mask(texts, tf.strings.length(tf.strings.strip(texts)) > 0)
    return tf.data.Dataset.from_tensor_slices({'targets': texts + '\n'})

  return dataset.flat_map(pieces)


def split_long_pieces(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, int]
) -> tf.data.Dataset:
  """Cuts pieces that are longer than half a row, so that each row has room for two or more."""
  longest = max(1, sequence_length['targets'] // 2)

  def parts(example: Mapping[str, tf.Tensor]) -> tf.data.Dataset:
    tokens = tf.data.Dataset.from_tensor_slices(example['targets'])
    return tokens.batch(longest).map(lambda part: {'targets': part})

  return dataset.flat_map(parts)


seqio.TaskRegistry.add(
    TASK_NAME,
    source=StdlibSource(),
    preprocessors=[
        split_at_blank_lines,
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos,
        split_long_pieces,
    ],
    output_features={'targets': seqio.Feature(vocabulary=VOCABULARY, add_eos=True)},
    metric_fns=[],
    shuffle_buffer_size=SHUFFLE_BUFFER_SIZE,
)
