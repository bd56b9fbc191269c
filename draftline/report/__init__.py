"""One page about one run: what was learned, how fast, what it decodes, on what data, with which settings.

    run_folder.py   what the folder of a run says, whole or not, finished or going on
    curves.py       charts of what was learned and of who waited for whom
    evaluation.py   what `draftline evaluate` measured: figures, bars, answers coloured by slot
    verdict.py      what the audit found
    document.py     all of it as one HTML page
    watch.py        the same page, served on loopback while the run goes on

Everything is read from files; nothing here loads a model, so that a page is there in seconds.
"""
