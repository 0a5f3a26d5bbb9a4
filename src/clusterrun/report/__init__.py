"""What a run did, for people: following it live, its summary."""
