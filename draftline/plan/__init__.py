"""What a run will take, said before it starts: memory by item, disk, bytes on the wire, time.

sizes.py     what a target is, from its configuration alone       work.py      the arithmetic of each half, from shapes
devices.py   what a device can do, from a table or measured here  estimate.py  all of it together
"""
