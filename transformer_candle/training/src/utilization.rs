//! Samples a run's use of its machine (memory, CPU, GPU), on a thread beside training.
//!
//! The thread reads `/proc` and NVML, which may block for seconds where a driver has failed: the trainer never waits
//! for a sample, and no sampled number enters a computation.

use std::{
    collections::VecDeque,
    fs,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::{
    gpu_state::GpuMonitor,
    report::{GpuUtilization, UtilizationReport},
};

/// Maximum number of samples kept until they are taken; older ones are dropped.
const MAX_PENDING: usize = 64;
/// How long dropping a sampler waits for its thread. A thread that a driver blocks ends later.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);
/// Units of `/proc/self/stat` per second: `USER_HZ`, 100 on every architecture that this program is built for.
const TICKS_PER_SECOND: f64 = 100.0;

/// A thread that samples until it is dropped.
#[derive(Debug)]
pub(crate) struct UtilizationSampler {
    pending: Arc<Mutex<VecDeque<UtilizationReport>>>,
    /// The thread ends when this is dropped.
    running: Option<Sender<()>>,
    /// Disconnected once the thread has ended.
    end_signal: Receiver<()>,
}

impl UtilizationSampler {
    /// Starts sampling this process, and the GPU with the UUID `gpu`, every `every`. Where the system has no `/proc`,
    /// or cannot start a thread, there are no samples.
    pub(crate) fn start(every: Duration, gpu: Option<String>) -> Self {
        let open = move || gpu.and_then(|uuid| GpuMonitor::open(&uuid));
        Self::sampling(every, open, GpuMonitor::read, |earlier| ProcessUsage::read(Path::new("/proc/self"), earlier))
    }

    /// Returns a sampler that never samples.
    pub(crate) fn off() -> Self {
        let (_, end_signal) = mpsc::channel();
        Self { pending: Arc::default(), running: None, end_signal }
    }

    fn sampling<M>(
        every: Duration,
        open: impl FnOnce() -> Option<M> + Send + 'static,
        read_gpu: impl Fn(&M) -> Option<GpuUtilization> + Send + 'static,
        read_process: impl Fn(Option<&ProcessUsage>) -> Option<ProcessUsage> + Send + 'static,
    ) -> Self {
        let pending: Arc<Mutex<VecDeque<UtilizationReport>>> = Arc::default();
        let (running, stop) = mpsc::channel::<()>();
        let (at_end, end_signal) = mpsc::channel();
        let samples = Arc::clone(&pending);
        let sample = move || {
            // Dropped in reverse order: the samples are released before the end is signalled.
            let _at_end: Sender<()> = at_end;
            let samples = samples;
            let monitor = open();
            let mut earlier = read_process(None);
            while stop.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let Some(usage) = read_process(earlier.as_ref()) else {
                    continue;
                };
                let report = usage.report(monitor.as_ref().and_then(&read_gpu));
                let mut samples = samples.lock().unwrap_or_else(PoisonError::into_inner);
                if samples.len() == MAX_PENDING {
                    samples.pop_front();
                }
                samples.push_back(report);
                earlier = Some(usage);
            }
        };
        // Without the thread there are no samples.
        let _ = thread::Builder::new().name("utilization".to_owned()).spawn(sample);
        Self { pending, running: Some(running), end_signal }
    }

    /// Returns the samples since the last call, for a run that has taken `step` steps.
    pub(crate) fn take(&self, step: u64) -> Vec<UtilizationReport> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.drain(..).map(|report| UtilizationReport { step, ..report }).collect()
    }
}

impl Drop for UtilizationSampler {
    fn drop(&mut self) {
        drop(self.running.take());
        // An error either way: disconnected when the thread has ended, or the time is over.
        let _ = self.end_signal.recv_timeout(SHUTDOWN_TIMEOUT);
    }
}

/// The process's memory and CPU use at one moment.
#[derive(Clone, Debug)]
struct ProcessUsage {
    at: Instant,
    rss_bytes: u64,
    swap_bytes: u64,
    cpu_seconds: f64,
    /// Mean number of busy cores since the earlier reading; 0 without one.
    cpu_cores: f64,
}

impl ProcessUsage {
    /// Reads a process's folder of `/proc`; None where it does not exist.
    fn read(folder: &Path, earlier: Option<&Self>) -> Option<Self> {
        let status = fs::read_to_string(folder.join("status")).ok()?;
        let kibibytes =
            |name| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
        let bytes = |name| kibibytes(name).map(|kibibytes: u64| kibibytes * 1024);
        let cpu_seconds = cpu_seconds(&fs::read_to_string(folder.join("stat")).ok()?)?;
        let at = Instant::now();
        let cpu_cores = earlier.map_or(0.0, |earlier| {
            let seconds = at.duration_since(earlier.at).as_secs_f64();
            ((cpu_seconds - earlier.cpu_seconds) / seconds.max(f64::MIN_POSITIVE)).max(0.0)
        });
        // A kernel without swap has no line for it.
        let swap_bytes = bytes("VmSwap:").unwrap_or(0);
        Some(Self { at, rss_bytes: bytes("VmRSS:")?, swap_bytes, cpu_seconds, cpu_cores })
    }

    fn report(&self, gpu: Option<GpuUtilization>) -> UtilizationReport {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let Self { rss_bytes, swap_bytes, cpu_cores, .. } = *self;
        UtilizationReport { step: 0, time, rss_bytes, cpu_cores, swap_bytes, ranks: None, gpu }
    }
}

/// Returns a process's user and system time in seconds, from the 14th and 15th field of `/proc/self/stat`. The second
/// field, its name, may hold spaces and parentheses.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let mut behind_name = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || behind_name.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_from_proc() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("status"), "Name:\tx\nVmRSS:\t    2048 kB\nVmSwap:\t       4 kB\n").unwrap();
        let stat = "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 1500 250 0 0 20 0 3 0 99";
        fs::write(folder.path().join("stat"), stat).unwrap();
        let usage = ProcessUsage::read(folder.path(), None).unwrap();
        assert_eq!((usage.rss_bytes, usage.swap_bytes, usage.cpu_cores), (2 << 20, 4096, 0.0));
        assert!((usage.cpu_seconds - 17.5).abs() < 1e-9);
        let earlier =
            ProcessUsage { at: usage.at.checked_sub(Duration::from_secs(10)).unwrap(), cpu_seconds: 0.0, ..usage };
        let cores = ProcessUsage::read(folder.path(), Some(&earlier)).unwrap().cpu_cores;
        assert!((1.0..=1.75).contains(&cores), "17.5 seconds of work in ten: {cores}");
        assert!(ProcessUsage::read(&folder.path().join("absent"), None).is_none());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_is_sampled_until_the_sampler_is_dropped() {
        let sampler = UtilizationSampler::start(Duration::from_millis(1), None);
        let samples = loop {
            let samples = sampler.take(7);
            if !samples.is_empty() {
                break samples;
            }
            thread::yield_now();
        };
        assert!(samples.iter().all(|sample| sample.step == 7 && sample.rss_bytes > 1 << 20 && sample.gpu.is_none()));
        let pending = Arc::downgrade(&sampler.pending);
        drop(sampler);
        assert_eq!(pending.strong_count(), 0, "the thread has ended");
    }

    #[test]
    fn a_gpu_that_stops_answering_leaves_the_process_sampled() {
        let reads = std::sync::atomic::AtomicUsize::new(0);
        let answers_once = move |(): &()| {
            (reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0).then(GpuUtilization::default)
        };
        let usage = ProcessUsage { at: Instant::now(), rss_bytes: 1, swap_bytes: 0, cpu_seconds: 0.0, cpu_cores: 0.0 };
        let sampler = UtilizationSampler::sampling(
            Duration::from_millis(1),
            || Some(()),
            answers_once,
            move |_| Some(usage.clone()),
        );
        let mut samples = Vec::new();
        while samples.len() < 3 {
            samples.extend(sampler.take(0));
        }
        let has_gpu: Vec<bool> = samples.iter().map(|sample| sample.gpu.is_some()).collect();
        assert_eq!(has_gpu[..3], [true, false, false]);
    }

    #[test]
    fn dropping_does_not_wait_for_a_driver_that_hangs() {
        let (release, hanging) = mpsc::channel::<()>();
        let hang = move || {
            let _ = hanging.recv();
            None::<()>
        };
        let sampler = UtilizationSampler::sampling(Duration::from_millis(1), hang, |()| None, |_| None);
        drop(sampler);
        release.send(()).unwrap();
    }
}
