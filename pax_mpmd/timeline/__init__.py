"""What steps look like in time: records, events, simulation of plans, pictures and tables."""
