"""The ground floor: what any room may use and what knows no other room."""
