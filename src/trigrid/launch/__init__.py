"""How processes of one job find each other: what a launcher says of them."""
