"""How long an iteration takes and how many watts it draws: fitted to profiles, as published, or estimated."""
