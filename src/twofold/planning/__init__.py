"""Which machines to buy and how to split them: searches over designs by simulation."""
