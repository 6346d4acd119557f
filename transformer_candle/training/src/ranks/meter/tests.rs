use std::{
    sync::{Arc, Barrier, Mutex, mpsc},
    thread,
};

use kernels::Device;

use super::*;
use crate::ranks::{Exchange, Parcel, RankInfo};

/// The exchange of one of two ranks, each a thread. It sends a message when it begins to wait for the other.
#[derive(Debug)]
struct Pair {
    rank: usize,
    barrier: Arc<Barrier>,
    rows: Arc<Mutex<[Vec<f64>; 2]>>,
    waiting: mpsc::Sender<()>,
}

impl Exchange for Pair {
    fn rank_info(&self) -> RankInfo {
        RankInfo { rank: self.rank, world_size: 2, local_rank: self.rank, local_world_size: 2 }
    }

    fn connect(&self, _: &Device) -> Result<()> {
        unreachable!("there is no device")
    }

    fn begin_swap(&self, _: &[Parcel], _: &[Parcel]) -> Result<()> {
        unreachable!("there are no buffers")
    }

    fn end_swap(&self) -> Result<()> {
        unreachable!("there are no buffers")
    }

    fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        let _ = self.waiting.send(());
        self.rows.lock().unwrap()[self.rank] = numbers.to_vec();
        self.barrier.wait();
        let rows = self.rows.lock().unwrap().clone();
        self.barrier.wait();
        numbers.iter_mut().enumerate().for_each(|(index, number)| *number = rows[0][index] + rows[1][index]);
        Ok(())
    }

    fn gather(&self, _: &str) -> Result<Vec<String>> {
        unreachable!("there are no texts")
    }
}

const WORK: Duration = Duration::from_millis(30);

fn work() {
    let start = Instant::now();
    while start.elapsed() < WORK {
        thread::yield_now();
    }
}

/// Takes a step whose rank works before and after the sum, once `begin` returns; returns the sum of `number`.
fn step(meter: &mut RankMeter, number: f64, begin: impl Fn(), work: impl Fn()) -> f64 {
    let usage = RankUsage { rss_bytes: number as u64, cpu_cores: number, swap_bytes: 0 };
    meter.begin_step().unwrap();
    meter.loaded(Duration::ZERO, usage);
    begin();
    work();
    let mut numbers = [number, 0.1];
    meter.sum(&mut numbers).unwrap();
    assert_eq!(numbers[1].to_bits(), 0.2_f64.to_bits());
    work();
    meter.end_step().unwrap();
    numbers[0]
}

#[test]
fn waiting_for_a_slow_rank_counts_as_exchange() {
    let (barrier, rows) = (Arc::new(Barrier::new(2)), Arc::default());
    let (waiting, fast_waits) = mpsc::channel();
    let (ignored, _ignored) = mpsc::channel();
    let meter = |rank, waiting| {
        let (barrier, rows) = (Arc::clone(&barrier), Arc::clone(&rows));
        RankMeter::new(Ranks::new(Arc::new(Pair { rank, barrier, rows, waiting })))
    };
    let (mut fast, mut slow) = (meter(0, waiting), meter(1, ignored));
    let figures = thread::scope(|scope| {
        let fast = scope.spawn(|| {
            (0..2).for_each(|_| assert_eq!(step(&mut fast, 3.0, || (), || ()).to_bits(), 7_f64.to_bits()));
            fast.of_all().to_vec()
        });
        for _ in 0..2 {
            // The fast rank waits as long as the slow one's first work takes.
            step(&mut slow, 4.0, || fast_waits.recv().unwrap(), work);
        }
        assert_eq!(fast.join().unwrap(), slow.of_all());
        slow.of_all().to_vec()
    });
    let work = WORK.as_secs_f64();
    assert!(figures[0].exchange_seconds >= work, "{figures:?}");
    assert!(figures[1].compute_seconds >= 2.0 * work, "the update of the step before counts too: {figures:?}");
    assert_eq!(figures[1].usage, RankUsage { rss_bytes: 4, cpu_cores: 4.0, swap_bytes: 0 });
}

#[test]
fn data_wait_is_not_compute() {
    let (waiting, _waits) = mpsc::channel();
    let alone = Pair { rank: 0, barrier: Arc::new(Barrier::new(1)), rows: Arc::default(), waiting };
    alone.rows.lock().unwrap()[1] = vec![0.0; 2 * RankFigures::NUMBERS];
    let mut meter = RankMeter::new(Ranks::new(Arc::new(alone)));
    meter.begin_step().unwrap();
    let start = Instant::now();
    work();
    let wait = start.elapsed();
    meter.loaded(wait, RankUsage::default());
    meter.sum(&mut []).unwrap();
    let own = meter.of_all()[0];
    assert_eq!(own.data_wait_seconds.to_bits(), wait.as_secs_f64().to_bits());
    assert!(own.compute_seconds >= 0.0 && own.compute_seconds <= start.elapsed().as_secs_f64() - wait.as_secs_f64());
}

#[test]
fn one_process_measures_nothing() {
    let mut meter = RankMeter::default();
    assert_eq!(step_alone(&mut meter), 3.0_f64.to_bits());
    assert_eq!(meter.of_all(), []);
    assert!(meter.measured.is_none());
}

fn step_alone(meter: &mut RankMeter) -> u64 {
    meter.begin_step().unwrap();
    let mut numbers = [3.0];
    meter.sum(&mut numbers).unwrap();
    numbers[0].to_bits()
}
