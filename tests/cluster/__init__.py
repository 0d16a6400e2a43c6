"""Tests on one real Serve start; `-m "not cluster"` leaves them out."""
