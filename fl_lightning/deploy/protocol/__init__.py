"""What server and nodes say to each other: messages, what they may hold, and what both must agree
on."""
