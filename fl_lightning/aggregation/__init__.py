"""From the uploads of a round to the server's next state."""
