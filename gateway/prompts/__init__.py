"""The prompt of a turn as its engine will see it: made here where that is proven, by a worker elsewhere."""
