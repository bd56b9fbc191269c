"""Names of the files of a prepared folder; what is in them is said in `dataset`."""

IDS_FILE = "input_ids.bin"
MASK_FILE = "loss_mask.bin"
ROWS_FILE = "rows.npy"
META_FILE = "meta.json"
REPORT_FILE = "report.json"
