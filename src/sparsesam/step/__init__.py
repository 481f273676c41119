"""One step of an optimizer: both passes of a closure or a loop, the base optimizer's update, what is kept between."""
