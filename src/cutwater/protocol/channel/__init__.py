"""What happens at the two ends of a channel, whatever its rows are made of and whoever carries them."""
