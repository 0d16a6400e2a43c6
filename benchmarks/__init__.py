"""Measurements, each one command; nothing here is imported by the product.

`serve` prints the table of throughputs, `example` the worked example of three rows through a live server. In reading
order: workload (texts), server (start and stop one), load (the client's process), in_process, plain_serve (what is
compared with), table (figures to text), serve, example. May import the product, ray, torch and aiohttp.
"""
