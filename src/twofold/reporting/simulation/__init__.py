"""What a simulation says, for people: tables, JSON and a page of pictures."""
