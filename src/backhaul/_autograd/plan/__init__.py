"""The plan of a pass and the test that the pass is over; pure logic, with one module that sends the messages."""
