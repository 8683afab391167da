"""WebShop: find a product that an instruction describes, choose its options, buy it."""
