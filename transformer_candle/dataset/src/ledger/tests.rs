use super::*;

fn record(step: u64) -> LedgerRecord {
    let batch = "b".repeat(64);
    let sequence_ranges = vec![SequenceRange { component: 0, epoch: 0, window: 0, first_sequence: step, sequences: 1 }];
    LedgerRecord::Step(StepRecord { step, sequence_ranges, targets: 8, batch })
}

fn ledger_with_steps(path: &Path, steps: u64) -> LedgerHead {
    let mut ledger = Ledger::open(path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    for step in 1..=steps {
        ledger.append(&record(step)).unwrap();
    }
    ledger.sync().unwrap()
}

fn steps(path: &Path, head: &LedgerHead) -> Result<Vec<u64>, DataError> {
    let mut steps = Vec::new();
    for_each_record(path, head, &CancelToken::new(), |record| {
        if let LedgerRecord::Step(record) = record {
            steps.push(record.step);
        }
        Ok(())
    })?;
    Ok(steps)
}

#[test]
fn stored_records_keep_their_keys() {
    let components = vec![BeginPosition { epoch: 1, window: 2, sequence: 3, delivered: 4 }];
    let start = WindowStart { epoch: 1, window: 2, next_shard: 3, open_shards: vec![None] };
    let row_ranges = vec![RowRange { shard: 4, row_group: 5, first_row: 6, rows: 7 }];
    let skipped = SkippedRows::default();
    let window =
        WindowRecord { component: 0, start, row_ranges, documents: 7, skipped, truncated: 0, targets: 8, sequences: 9 };
    let left_out = vec![SequenceRange { component: 0, epoch: 1, window: 2, first_sequence: 3, sequences: 6 }];
    let records = [
        LedgerRecord::Begin(BeginRecord { step: 1, stage: 0, components }),
        LedgerRecord::Window(window),
        record(2),
        LedgerRecord::Stage(StageRecord { stage: 1, step: 3, left_out }),
    ];
    let lines = [
        r#"{"kind":"begin","step":1,"components":[{"epoch":1,"window":2,"sequence":3,"given":4}]}"#.to_owned(),
        concat!(
            r#"{"kind":"window","component":0,"epoch":1,"window":2,"next_file":3,"lanes":[null],"#,
            r#""pieces":[{"file":4,"group":5,"row":6,"rows":7}],"documents":7,"#,
            r#""skipped":{"null":0,"empty":0,"not_utf8":0,"malformed":0,"too_long":0},"targets":8,"sequences":9}"#
        )
        .to_owned(),
        format!(
            r#"{{"kind":"step","step":2,"taken":[{{"component":0,"epoch":0,"window":0,"sequence":2,"sequences":1}}],"targets":8,"batch":"{}"}}"#,
            "b".repeat(64)
        ),
        concat!(
            r#"{"kind":"stage","stage":1,"step":3,"#,
            r#""left_out":[{"component":0,"epoch":1,"window":2,"sequence":3,"sequences":6}]}"#
        )
        .to_owned(),
    ];
    for (record, line) in records.iter().zip(lines) {
        assert_eq!(serde_json::to_string(record).unwrap(), line);
        assert_eq!(&serde_json::from_str::<LedgerRecord>(&line).unwrap(), record);
    }
}

#[test]
fn records_are_read_up_to_the_head() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    assert_eq!(steps(&path, &LedgerHead::empty()).unwrap(), [0_u64; 0], "a missing file is an empty ledger");
    let three = ledger_with_steps(&path, 3);
    assert_eq!(steps(&path, &three).unwrap(), [1, 2, 3]);
    let mut ledger = Ledger::open(&path, &three, &CancelToken::new()).unwrap();
    ledger.append(&record(4)).unwrap();
    assert_eq!(steps(&path, &ledger.sync().unwrap()).unwrap(), [1, 2, 3, 4]);
    assert_eq!(steps(&path, &three).unwrap(), [1, 2, 3]);
}

#[test]
fn resuming_cuts_off_lines_after_the_head() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let two = ledger_with_steps(&path, 2);
    let five = ledger_with_steps(&path, 5);
    let mut ledger = Ledger::open(&path, &two, &CancelToken::new()).unwrap();
    for step in 3..=5 {
        ledger.append(&record(step)).unwrap();
    }
    assert_eq!(ledger.sync().unwrap(), five, "the same lines give the same chain");
}

#[test]
fn heads_cover_only_lines_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let mut ledger = Ledger::open(&path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    ledger.append(&record(1)).unwrap();
    let one = ledger.sync().unwrap();
    let disk = ledger.file.replace_file(std::fs::File::options().write(true).open("/dev/full").unwrap());
    ledger.append(&record(2)).unwrap();
    assert_eq!(ledger.sync(), None);
    assert_eq!(steps(&path, &one).unwrap(), [1], "an earlier head stays valid");
    ledger.file.replace_file(disk);
    ledger.append(&record(3)).unwrap();
    assert_eq!(steps(&path, &ledger.sync().unwrap()).unwrap(), [1, 2, 3]);
    assert_eq!(ledger.take_notices().len(), 2);
}

#[test]
fn any_changed_lost_or_swapped_byte_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let head = ledger_with_steps(&path, 4);
    let intact = std::fs::read(&path).unwrap();
    let lines: Vec<&[u8]> = intact.split_inclusive(|&byte| byte == b'\n').collect();
    let mut corrupted: Vec<Vec<u8>> = (0..intact.len())
        .step_by(7)
        .map(|at| {
            let mut bytes = intact.clone();
            bytes[at] ^= 1;
            bytes
        })
        .collect();
    corrupted.push(intact[..intact.len() - 1].to_vec());
    corrupted.push([lines[1], lines[0], lines[2], lines[3]].concat());
    corrupted.push([lines[0], lines[1], lines[2], lines[2]].concat());
    for bytes in corrupted {
        std::fs::write(&path, bytes).unwrap();
        let error = Ledger::open(&path, &head, &CancelToken::new()).unwrap_err();
        assert!(matches!(error, DataError::Ledger { .. }), "{error}");
    }
}
