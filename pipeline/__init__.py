"""The library: pure logic first, then the bus it travels on and the stage runtime that joins the two."""
