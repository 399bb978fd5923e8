"""The read models: what the log says, as rows that can be listed, filtered and paged.

Every row is a pure fold of the events in stream order: the same events give the same rows, byte for byte, however they
were cut into batches. So a view holds nothing that is not in the log and can be built anew at any time. Nobody decides
anything from a row; commands are decided from the session as folded by `turnstream.session`.

    database.py     the engine, reading the active generation, waiting for a position
    generations.py  a set of tables and its checkpoint: made, written, put in force, dropped
    batch.py        a batch of events becomes changed rows
    cache.py        what the writer remembers of them
    sessions.py  runs.py  requests.py  history.py  steps.py
                    one file a view: its table, how events change it, how it is asked
    session_row.py  run_row.py
                    how events change a session and a run, where that is longer
    live_runs.py    the runs that have not ended, for whoever looks after them
"""
