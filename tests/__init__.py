"""Tests: one folder per package, one per seed contract; shared fakes in `fakes`, strategies in `strategies`."""
