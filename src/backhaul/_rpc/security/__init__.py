"""What peers may call, and how much."""
