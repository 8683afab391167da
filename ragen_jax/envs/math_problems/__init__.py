"""Math: word problems by a grammar, with exact answers and several attempts."""
