"""What happens to contexts and passes when a worker is lost."""
