"""What a cache file holds, reading and writing it, and which row serves."""
