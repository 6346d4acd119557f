//! A lease: who owns a run directory where the file system has no locks.
//!
//! `.trainer.lease` names the processes that own the run, and counts beats: as long as one of them lives, the count
//! rises every few seconds. Another process learns from it whether the run is owned, with no clock in common. A process
//! of its own machine is asked for by its id and start; of any other one it watches whether the count still rises.
//!
//! The file is written in place, in its full size, so that a full disk does not stop the beats.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::{
    LEASE, Owner,
    process::{Life, Process},
};
use crate::atomic_file;

/// Bytes of the file: room for the processes that own one run, padded with spaces.
const FILE_BYTES: usize = 2048;

/// The times of the protocol.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Between two beats of an owner.
    pub(super) beat: Duration,
    /// After this time without a beat an owner elsewhere counts as ended.
    pub(super) patience: Duration,
    /// Between claiming a lease and looking whether somebody else has claimed it at the same moment.
    pub(super) settle: Duration,
}

impl Timing {
    pub(super) const USUAL: Self =
        Self { beat: Duration::from_secs(5), patience: Duration::from_secs(30), settle: Duration::from_secs(1) };
}

/// Why a lease was not taken.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Its owner lives.
    Held(Owner),
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    /// A number that who claimed it has drawn at random.
    token: String,
    beat: u64,
    host: String,
    processes: Vec<Process>,
}

/// A lease that this process owns, alone or with the one that it was inherited from; given up on drop.
#[derive(Debug)]
pub(super) struct Lease {
    state: Arc<State>,
    /// Ends the thread that beats when it is dropped.
    stop: Option<mpsc::Sender<()>>,
    beating: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    path: PathBuf,
    token: String,
    own: Process,
    timing: Timing,
    renewed: Mutex<Renewed>,
}

/// What the last look at the file has told.
#[derive(Debug)]
struct Renewed {
    at: Instant,
    /// Who has claimed the lease in the meantime.
    lost_to: Option<Owner>,
}

impl Lease {
    /// Takes the lease of a run directory. One that is inherited is shared with the process that has taken it.
    pub(super) fn take(folder: &Path, own: Process, inherited: bool, timing: Timing) -> Result<Self, Refusal> {
        let path = folder.join(LEASE);
        let found = read(&path)?;
        let shared = found.as_deref().and_then(Content::parse).filter(|_| inherited);
        let token = match shared {
            Some(mut content) => {
                content.processes.push(own.clone());
                open(&path)?.write_all_at(&content.to_bytes()?, 0)?;
                content.token
            }
            None => claim(&path, found, &own, timing)?,
        };
        let renewed = Mutex::new(Renewed { at: Instant::now(), lost_to: None });
        let state = Arc::new(State { path, token, own, timing, renewed });
        let (stop, stopped) = mpsc::channel();
        let beating = thread::Builder::new().name("lease".to_owned()).spawn({
            let state = Arc::clone(&state);
            move || state.beat_until(&stopped)
        })?;
        Ok(Self { state, stop: Some(stop), beating: Some(beating) })
    }

    /// Returns who has taken the lease over, while this process did not beat: it was suspended, or its disk was.
    pub(super) fn lost_to(&self) -> Option<Owner> {
        let is_late = self.state.renewed().at.elapsed() > self.state.timing.patience / 2;
        if is_late {
            // What cannot be asked now is asked before the next step.
            let _ = self.state.renew();
        }
        self.state.renewed().lost_to.clone()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(beating) = self.beating.take() {
            // It does not panic; if it did, the lease would end by itself.
            let _ = beating.join();
        }
        // What cannot be given up ends with the process.
        let _ = self.state.give_up();
    }
}

impl State {
    fn renewed(&self) -> MutexGuard<'_, Renewed> {
        self.renewed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat_until(&self, stopped: &mpsc::Receiver<()>) {
        while stopped.recv_timeout(self.timing.beat) == Err(mpsc::RecvTimeoutError::Timeout) {
            // A disk that fails for a moment may recover before the next beat.
            let _ = self.renew();
        }
    }

    /// Raises the beat, unless the lease is lost.
    fn renew(&self) -> io::Result<()> {
        let mut renewed = self.renewed();
        if renewed.lost_to.is_some() {
            return Ok(());
        }
        match self.changed(|content| content.beat += 1)? {
            None => renewed.at = Instant::now(),
            Some(other) => renewed.lost_to = Some(other.owner()),
        }
        Ok(())
    }

    /// Changes the content of the lease; returns that of another one, which has replaced it.
    fn changed(&self, change: impl FnOnce(&mut Content)) -> io::Result<Option<Content>> {
        let file = match open(&self.path) {
            // Removed by hand: it is made again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(&self.path)?,
            opened => opened?,
        };
        let content = content_of(&file)?;
        if let Some(other) = content.as_ref().filter(|content| content.token != self.token) {
            return Ok(Some(other.clone()));
        }
        let mut content = content.unwrap_or_else(|| Content::new(self.token.clone(), self.own.clone()));
        // Written over by the process that it is shared with, at the same moment.
        if !content.processes.contains(&self.own) {
            content.processes.push(self.own.clone());
        }
        change(&mut content);
        // Where it was replaced since it was opened, this writes into the file that is no longer there.
        file.write_all_at(&content.to_bytes()?, 0)?;
        Ok(None)
    }

    /// Takes this process, and ended ones, from the owners; removes the lease of the last one.
    fn give_up(&self) -> io::Result<()> {
        let mut is_last = false;
        let others = self.changed(|content| {
            content.processes.retain(|process| *process != self.own && process.life(&self.own) != Life::Ended);
            is_last = content.processes.is_empty();
        })?;
        if others.is_none() && is_last { fs::remove_file(&self.path) } else { Ok(()) }
    }
}

impl Content {
    fn new(token: String, process: Process) -> Self {
        Self { token, beat: 0, host: super::host(), processes: vec![process] }
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self)?;
        if bytes.len() > FILE_BYTES {
            return Err(io::Error::other("the run has more owners than its lease has room for"));
        }
        bytes.resize(FILE_BYTES, b' ');
        Ok(bytes)
    }

    /// Writes it in place of another one. The name of its staging file is its own: others claim the lease too, in
    /// containers with equal process ids.
    fn replace(&self, path: &Path) -> io::Result<()> {
        let staging = path.with_file_name(format!(".{LEASE}{}{}", atomic_file::STAGING, self.token));
        let outcome = create(&staging)
            .and_then(|file| file.write_all_at(&self.to_bytes()?, 0).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&staging, path));
        if outcome.is_err() {
            let _ = fs::remove_file(&staging);
        }
        outcome
    }

    fn owner(&self) -> Owner {
        Owner { pid: self.processes.last().map_or(0, |process| process.pid), host: self.host.clone() }
    }
}

/// Writes a lease of one's own in place of the one that was found, whose owner has ended; returns its token.
fn claim(path: &Path, found: Option<Vec<u8>>, own: &Process, timing: Timing) -> Result<String, Refusal> {
    if let Some(found) = found
        && let Some(owner) = living_owner(path, &found, own, timing)?
    {
        return Err(Refusal::Held(owner));
    }
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let content = Content::new(u64::from_le_bytes(random).to_string(), own.clone());
    content.replace(path)?;
    // Of two that found the same ended owner, the one that has replaced the other's lease has it.
    thread::sleep(timing.settle);
    match read(path)?.as_deref().and_then(Content::parse) {
        Some(other) if other.token != content.token => Err(Refusal::Held(other.owner())),
        _ => Ok(content.token),
    }
}

/// Returns the owner of a lease if it lives, which is watched for where it cannot be asked.
fn living_owner(path: &Path, found: &[u8], own: &Process, timing: Timing) -> io::Result<Option<Owner>> {
    let content = Content::parse(found);
    let lives = content
        .as_ref()
        .map_or_else(Vec::new, |content| content.processes.iter().map(|process| process.life(own)).collect());
    let owner = content.map(|content| content.owner()).unwrap_or_default();
    if lives.contains(&Life::Lives) {
        return Ok(Some(owner));
    }
    if !lives.is_empty() && lives.iter().all(|life| *life == Life::Ended) {
        return Ok(None);
    }
    tracing::warn!(
        "{} is of process {} on {}: waiting {} s to see whether it trains here",
        path.display(),
        owner.pid,
        owner.host,
        timing.patience.as_secs()
    );
    let start = Instant::now();
    while start.elapsed() < timing.patience {
        thread::sleep(timing.beat.min(timing.patience.saturating_sub(start.elapsed())));
        match read(path)? {
            None => return Ok(None),
            Some(now) if now != found => {
                return Ok(Some(Content::parse(&now).map(|content| content.owner()).unwrap_or(owner)));
            }
            Some(_) => {}
        }
    }
    Ok(None)
}

/// Opens a lease for reading and writing. It follows no link.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path)
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path)
}

/// Reads a lease; None if there is none. It is opened anew each time, which makes network file systems ask the server.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match open(path) {
        Ok(file) => bytes_of(&file).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads an open lease; None if it was just created.
fn content_of(file: &File) -> io::Result<Option<Content>> {
    let bytes = bytes_of(file)?;
    if bytes.is_empty() { Ok(None) } else { Ok(serde_json::from_slice(&bytes)?) }
}

fn bytes_of(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; FILE_BYTES];
    let mut filled = 0;
    while filled < FILE_BYTES {
        match file.read_at(&mut bytes[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

#[cfg(test)]
mod tests;
