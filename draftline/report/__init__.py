"""One page about one run: what was learned, how fast, what it decodes, on what data, with which settings.

    curves.py       charts of what was learned and of who waited for whom
    results.py      what `draftline evaluate` measured and the audit found: figures, bars, answers coloured by slot
    document.py     all of it as one HTML page, with what the folder says and what the data was
    watch.py        the same page, served on loopback while the run goes on

Everything is read from files; nothing here loads a model, so that a page is there in seconds.
"""
