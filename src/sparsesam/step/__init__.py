"""The optimizer step: both passes, the base optimizer's update, and the state kept between steps."""
