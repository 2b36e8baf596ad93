"""What a run came to, as one page: read from its folder, told in tables and charts. No torch here."""
