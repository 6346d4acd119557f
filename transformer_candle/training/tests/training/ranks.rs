//! Several ranks as threads of one process, which exchange through shared memory.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use kernels::{Buffer, DType, Device, bf16};
use training::{
    Result,
    ranks::{Exchange, Parcel, RankInfo, Ranks, Vote},
};

use super::*;

/// Parts of buffers that were sent and not yet received.
type Parcels = BTreeMap<(usize, usize), VecDeque<Vec<u8>>>;

/// The shared memory through which the ranks exchange.
#[derive(Debug)]
struct Meeting {
    barrier: Barrier,
    facts: Mutex<Vec<Vec<u8>>>,
    /// The parts by sender and receiver, in the order in which they were sent.
    parcels: Mutex<Parcels>,
    /// Number of swaps that have begun on all ranks.
    swaps: AtomicUsize,
}

impl Meeting {
    fn new(world_size: usize) -> Arc<Self> {
        let (facts, barrier) = (Mutex::new(vec![Vec::new(); world_size]), Barrier::new(world_size));
        Arc::new(Self { barrier, facts, parcels: Mutex::default(), swaps: AtomicUsize::new(0) })
    }
}

/// The exchange of one rank, which is a thread.
#[derive(Debug)]
struct ThreadRank {
    rank_info: RankInfo,
    meeting: Arc<Meeting>,
    /// The parts that it receives in the current swap, and those that it has sent; None between swaps.
    under_way: Mutex<Option<UnderWay>>,
}

#[derive(Debug)]
struct UnderWay {
    received: Vec<Parcel>,
    outgoing: Vec<(Buffer, Vec<u8>)>,
}

impl ThreadRank {
    fn all(world_size: usize) -> Vec<Ranks> {
        Self::at(&Meeting::new(world_size), world_size)
    }

    fn at(meeting: &Arc<Meeting>, world_size: usize) -> Vec<Ranks> {
        let rank_info = |rank| RankInfo { rank, world_size, local_rank: rank, local_world_size: world_size };
        let rank = |rank| {
            let (rank_info, meeting) = (rank_info(rank), Arc::clone(meeting));
            Ranks::new(Arc::new(Self { rank_info, meeting, under_way: Mutex::default() }))
        };
        (0..world_size).map(rank).collect()
    }

    fn tell(&self, own: Vec<u8>) -> Vec<Vec<u8>> {
        self.meeting.facts.lock().unwrap()[self.rank_info.rank] = own;
        self.meeting.barrier.wait();
        let all = self.meeting.facts.lock().unwrap().clone();
        self.meeting.barrier.wait();
        all
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word))
}

fn bytes(buffer: &Buffer) -> Vec<u8> {
    match buffer.dtype() {
        DType::BF16 => buffer.read::<bf16>().unwrap().iter().flat_map(|value| value.to_le_bytes()).collect(),
        _ => buffer.read::<f32>().unwrap().iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

impl Exchange for ThreadRank {
    fn rank_info(&self) -> RankInfo {
        self.rank_info
    }

    fn connect(&self, device: &Device) -> Result<()> {
        assert!(device.as_cuda().is_none());
        Ok(())
    }

    fn begin_swap(&self, outgoing: &[Parcel], received: &[Parcel]) -> Result<()> {
        let (own, Meeting { parcels, swaps, .. }) = (self.rank_info.rank, &*self.meeting);
        swaps.fetch_add(1, Ordering::Relaxed);
        let sent_bytes: Vec<_> = outgoing.iter().map(|(_, part)| (part.clone(), bytes(part))).collect();
        for ((to, _), (_, bytes)) in outgoing.iter().zip(&sent_bytes) {
            parcels.lock().unwrap().entry((own, *to)).or_default().push_back(bytes.clone());
        }
        let under_way = UnderWay { received: received.to_vec(), outgoing: sent_bytes };
        assert!(self.under_way.lock().unwrap().replace(under_way).is_none(), "one swap at a time");
        Ok(())
    }

    fn end_swap(&self) -> Result<()> {
        let (own, Meeting { barrier, parcels, .. }) = (self.rank_info.rank, &*self.meeting);
        let UnderWay { received, outgoing } = self.under_way.lock().unwrap().take().expect("a swap has begun");
        for (part, sent_bytes) in &outgoing {
            assert!(bytes(part) == *sent_bytes, "what is sent has not changed since: it was complete");
        }
        barrier.wait();
        for (from, part) in received {
            let mut target = part.clone();
            let bytes = parcels.lock().unwrap().get_mut(&(from, own)).unwrap().pop_front().unwrap();
            match part.dtype() {
                DType::BF16 => {
                    let bits = bytes.as_chunks().0.iter().map(|bits| bf16::from_le_bytes(*bits));
                    target.write(&bits.collect::<Vec<_>>())?;
                }
                _ => target.write(&words(&bytes).collect::<Vec<_>>())?,
            }
        }
        barrier.wait();
        assert!(parcels.lock().unwrap().values().all(VecDeque::is_empty), "everything that is sent is received");
        barrier.wait();
        Ok(())
    }

    fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        let own: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        numbers.fill(0.0);
        for of_rank in self.tell(own) {
            let others = of_rank.as_chunks().0.iter().map(|number| f64::from_le_bytes(*number));
            numbers.iter_mut().zip(others).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }

    fn gather(&self, text: &str) -> Result<Vec<String>> {
        let all = self.tell(text.as_bytes().to_vec());
        Ok(all.into_iter().map(|text| String::from_utf8(text).unwrap()).collect())
    }
}

/// Trains with several ranks, and returns the outcome of each. `overrides` returns the overrides of a rank.
fn train_ranks<'a>(
    workshop: &Workshop,
    name: &str,
    (world_size, options): (usize, &RunOptions),
    overrides: impl Fn(usize) -> Vec<&'a str>,
) -> Vec<Result<RunOutcome>> {
    train_at(&Meeting::new(world_size), workshop, name, (world_size, options), overrides)
}

/// Trains as [`train_ranks`] does, with ranks that exchange through `meeting`.
fn train_at<'a>(
    meeting: &Arc<Meeting>,
    workshop: &Workshop,
    name: &str,
    (world_size, options): (usize, &RunOptions),
    overrides: impl Fn(usize) -> Vec<&'a str>,
) -> Vec<Result<RunOutcome>> {
    let runs: Vec<_> = (0..world_size).map(|rank| workshop.run(name, &overrides(rank))).collect();
    thread::scope(|scope| {
        let ranks = ThreadRank::at(meeting, world_size).into_iter().zip(runs);
        let threads: Vec<_> = ranks
            .map(|(ranks, run)| {
                scope.spawn(|| run_training(run, &RunOptions { ranks, ..options.clone() }, &StopSignal::new()))
            })
            .collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn succeeded(outcomes: Vec<Result<RunOutcome>>) {
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), RunOutcome::Finished);
    }
}

fn numbers(workshop: &Workshop, name: &str, kind: &str, key: &str) -> Vec<f64> {
    workshop.metrics(name, kind).iter().map(|line| line[key].as_f64().unwrap()).collect()
}

#[test]
fn ranks_change_losses_by_rounding_only() {
    let workshop = Workshop::new();
    for algorithm in ["optimizer.algorithm=adamw", "optimizer.algorithm=muon"] {
        let overrides = [algorithm, "data.batch_size=2", "scheduler.batch_warmup_steps=4"];
        let name = |ranks: usize| format!("{algorithm}-{ranks}");
        train(&workshop, &name(1), &overrides, &QUIET);
        for ranks in [2, 4] {
            succeeded(train_ranks(&workshop, &name(ranks), (ranks, &QUIET), |_| overrides.to_vec()));
            for (kind, key) in [("train", "loss"), ("train", "grad_norm"), ("evaluation", "loss")] {
                let (ours, expected) =
                    (numbers(&workshop, &name(ranks), kind, key), numbers(&workshop, &name(1), kind, key));
                assert_eq!(ours.len(), expected.len());
                for (ours, expected) in ours.iter().zip(&expected) {
                    assert!(
                        (ours - expected).abs() < 1e-6 * expected.max(1.0),
                        "{ranks} ranks, {kind} {key}: {ours} {expected}"
                    );
                }
            }
            let ledger = |ranks| fs::read(workshop.path().join(name(ranks)).join("ledger.jsonl")).unwrap();
            assert!(ledger(ranks) == ledger(1));
        }
    }
}

#[test]
fn blocks_exchange_gradients_during_the_backward_pass() {
    let workshop = Workshop::new();
    let sizes = ["model.hidden_size=256", "model.intermediate_size=1024", "model.num_layers=5"];
    let overrides =
        [&sizes[..], &["data.batch_size=2", "scheduler.total_steps=3", "scheduler.warmup_steps=1"]].concat();
    let (alone, shared) = (Meeting::new(1), Meeting::new(2));
    succeeded(train_at(&alone, &workshop, "one", (1, &QUIET), |_| overrides.clone()));
    succeeded(train_at(&shared, &workshop, "two", (2, &QUIET), |_| overrides.clone()));
    let [one, two] = ["one", "two"].map(|name| numbers(&workshop, name, "train", "loss"));
    assert!(one.iter().zip(&two).all(|(one, two)| (one - two).abs() < 1e-6 * one), "{one:?} {two:?}");
    let swaps = shared.swaps.load(Ordering::Relaxed);
    assert!(swaps >= 2 * 3 * 4, "{swaps}: each of two ranks in 3 steps exchanges weights once, gradients in 3 parts");
    assert_eq!(alone.swaps.load(Ordering::Relaxed), 3, "one rank has no other");
}

#[test]
fn metrics_have_the_times_of_all_ranks() {
    let workshop = Workshop::new();
    succeeded(train_ranks(&workshop, "run", (2, &QUIET), |_| vec!["data.batch_size=2"]));
    let lines = workshop.metrics("run", "train");
    assert_eq!(lines.len(), 10);
    let (mut steps, mut parts, mut tokens) = (0.0, 0.0, 0.0);
    for line in &lines {
        let number = |key: &str| line[key].as_f64().unwrap();
        let seconds: Vec<f64> =
            line["rank_compute_seconds"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
        assert_eq!(seconds.len(), 2);
        let (slowest, other) = if seconds[0] > seconds[1] { (0, 1) } else { (1, 0) };
        assert_eq!(line["slowest_rank"], slowest);
        assert!(number("slowest_rank_seconds").to_bits() == seconds[slowest].to_bits());
        assert!(number("median_rank_seconds").to_bits() == seconds[other].to_bits());
        assert!(seconds[other] > 0.0 && number("exchange_seconds") > 0.0);
        // These are parts of the first rank's steps, though not of this step alone.
        steps += number("step_seconds");
        parts += seconds[0] + number("exchange_seconds");
        let in_step = number("tokens") - std::mem::replace(&mut tokens, number("tokens"));
        assert!((number("tokens_per_second") * number("step_seconds") - in_step).abs() < 1e-6, "of all ranks: {line}");
    }
    assert!(parts <= steps, "{parts} of {steps}");
    let environment = fs::read_to_string(workshop.path().join("run/environment.json")).unwrap();
    let environment: serde_json::Value = serde_json::from_str(&environment).unwrap();
    assert_eq!(environment["hosts"], serde_json::json!([environment["host"], environment["host"]]));
    train(&workshop, "alone", &[], &QUIET);
    assert!(workshop.metrics("alone", "train").iter().all(|line| line.get("exchange_seconds").is_none()));
}

#[test]
fn any_number_of_ranks_resumes_a_checkpoint() {
    let workshop = Workshop::new();
    let overrides = ["data.batch_size=2", "runtime.precision=bf16", "optimizer.algorithm=muon"];
    let first_part = RunOptions { max_steps: Some(5), ..QUIET };
    let trained = |name: &str, ranks: usize, options: &RunOptions| {
        succeeded(train_ranks(&workshop, name, (ranks, options), |_| overrides.to_vec()));
    };
    trained("straight", 2, &QUIET);
    let straight = workshop.losses("straight", "train");
    for ranks in [1, 2, 4] {
        let name = format!("resumed-{ranks}");
        trained(&name, 2, &first_part);
        trained(&name, ranks, &resume(None));
        let losses = workshop.losses(&name, "train");
        assert_eq!(losses.len(), 10);
        if ranks == 2 {
            assert_eq!(losses, straight);
            for part in ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"] {
                assert!(workshop.saved(&name, 10, part) == workshop.saved("straight", 10, part));
            }
        }
        for ((_, loss), (_, expected)) in losses.iter().zip(&straight) {
            let difference = loss.parse::<f64>().unwrap() - expected.parse::<f64>().unwrap();
            assert!(difference.abs() < 1e-2, "{ranks} ranks: {difference}");
        }
    }
}

#[test]
fn ranks_that_differ_or_cannot_share_are_refused() {
    let workshop = Workshop::new();
    for (ranks, overrides, message) in [
        (2, vec!["scheduler.total_steps=11"], "scheduler.total_steps is 10 on rank 0 and 11 on rank 1"),
        (3, vec![], "8 sequences cannot be shared equally by 3 ranks"),
        (4, vec![], "2 micro-batches of 4, which 4 ranks cannot share equally"),
    ] {
        let of_rank = |rank| if rank == 1 { overrides.clone() } else { Vec::new() };
        for outcome in train_ranks(&workshop, "run", (ranks, &QUIET), of_rank) {
            let error = outcome.unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(message), "{error}");
        }
        assert!(!workshop.path().join("run/metrics.jsonl").exists());
    }
}

#[test]
fn all_ranks_fail_with_one_that_cannot_save() {
    let workshop = Workshop::new();
    fs::write(workshop.path().join("file"), "").unwrap();
    let unusable_folder = format!("runtime.checkpoint.directory={}", workshop.path().join("file/below").display());
    let outcomes = train_ranks(&workshop, "run", (2, &QUIET), |_| vec!["data.batch_size=2", &unusable_folder]);
    let errors: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(errors.iter().all(|error| error.contains("file/below")), "{errors:?}");
}

#[test]
fn a_signal_to_one_rank_saves_or_stops_all() {
    let workshop = Workshop::new();
    let rarely = ["runtime.checkpoint.every_n_steps=100000", "runtime.evaluation.every_n_steps=100000"];
    let overrides = [&["data.batch_size=2", "scheduler.total_steps=100000"][..], &rarely].concat();
    let runs = [0, 1].map(|_| workshop.run("run", &overrides));
    let stops = [StopSignal::new(), StopSignal::new()];
    let outcomes: Vec<_> = thread::scope(|scope| {
        let ranks = ThreadRank::all(2).into_iter().zip(runs).zip(&stops);
        let start = |((ranks, run), stop): ((Ranks, _), _)| {
            scope.spawn(move || run_training(run, &RunOptions { ranks, ..QUIET }, stop).unwrap())
        };
        let threads: Vec<_> = ranks.map(start).collect();
        stops[1].request_save(Some("SIGUSR2"));
        // The only reason to save.
        while !workshop.path().join("run/checkpoints/latest").exists() {
            thread::yield_now();
        }
        stops[1].request(StopReason::Terminate);
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(outcomes, [RunOutcome::Stopped(StopReason::Terminate); 2]);
    let last = workshop.metrics("run", "train").last().unwrap()["step"].as_u64().unwrap();
    assert_eq!(workshop.checkpoints("run").last().unwrap(), &format!("step-{last:08}"));
}

#[test]
fn ranks_skip_the_same_bad_file() {
    let workshop = Workshop::new();
    let folder = workshop.path().join("shards");
    fs::create_dir(&folder).unwrap();
    fs::copy(workshop.path().join("text.jsonl"), folder.join("text.jsonl")).unwrap();
    fs::write(folder.join("bad.parquet"), "no Parquet at all").unwrap();
    let shards = format!("data.train_shards=[{}]", folder.display());
    train(&workshop, "one", &[&shards], &QUIET);
    succeeded(train_ranks(&workshop, "two", (2, &QUIET), |_| vec![&shards]));
    let ledger = |name: &str| fs::read_to_string(workshop.path().join(name).join("ledger.jsonl")).unwrap();
    assert!(ledger("one").contains(r#""kind":"corrupted""#) && ledger("one").contains("bad.parquet"));
    assert_eq!(ledger("one"), ledger("two"));
}

#[test]
fn ranks_that_skip_different_rows_do_not_compute() {
    let agreed = |states: [&'static str; 2]| {
        let ranks = ThreadRank::all(2).into_iter().zip(states);
        let agree = |(ranks, state): (Ranks, &'static str)| thread::spawn(move || ranks.agree(Vote::Compute, state));
        let votes: Vec<_> = ranks.map(agree).collect();
        votes.into_iter().map(|vote| vote.join().unwrap().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(agreed(["", ""]), [Vote::Compute; 2]);
    assert_eq!(agreed(["[[{}]]", ""]), [Vote::Differ; 2]);
}
