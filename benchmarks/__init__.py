"""Measurements, each one command; nothing here is imported by the product.

`serve` prints the table of throughputs, `neighbours` what a quiet tenant notices of a flood, `overload` what is left at
several times the capacity, `planning` what choosing a batch costs, `example` the worked example of three rows through a
live server. In reading order: workload (texts), server (start and stop one), children (measuring processes), load
(closed loop), streams, open_loop, in_process, plain_serve (what is compared with), table, replies, memory (figures),
report, serve, testbed, neighbours, overload_report, overload, planning, example. May import the product, ray, torch and
aiohttp.
"""
