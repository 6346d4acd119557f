//! The ranks of a data-parallel run: processes that train one model together, each on its own micro-batches of every
//! step, each with its own shard of the optimizer's state (ZeRO-1, Rajbhandari et al. 2020).
//!
//! The training loop decides what is exchanged and when; an [`Exchange`] moves it. A step has the same micro-batches
//! whatever the number of ranks, so that losses differ by rounding only.

mod meter;
mod timed;

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc, time::Duration};

use kernels::{Buffer, Device};
use serde_json::Value;
use sha2::{Digest, Sha256};

pub use self::meter::{RankFigures, RankMeter};
use self::timed::TimedExchange;
use crate::{
    error::{Result, TrainerError},
    stop_reason::StopReason,
};

/// The rank of this process among those that train a model, as `torchrun` numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// This process's rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// Its rank among those on this machine, from 0.
    pub local_rank: usize,
    /// Ranks on this machine, which share its memory.
    pub local_world_size: usize,
}

impl Default for RankInfo {
    /// The rank of a process that trains alone.
    fn default() -> Self {
        Self { rank: 0, world_size: 1, local_rank: 0, local_world_size: 1 }
    }
}

impl RankInfo {
    /// Returns this rank's contiguous part of `count` items; the parts of all ranks, in their order, cover each item
    /// once.
    pub fn share(&self, count: usize) -> Range<usize> {
        let start_of = |rank: usize| count * rank / self.world_size;
        start_of(self.rank)..start_of(self.rank + 1)
    }

    /// Whether it is rank 0, which writes the run's files.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }
}

/// The rank that a part of a buffer goes to or comes from, and the part, of one dimension and not empty.
pub type Parcel = (usize, Buffer);

/// Moves data between the ranks. Every rank calls the same methods in the same order; each waits for all ranks.
///
/// # Errors
/// Every method fails with [`TrainerError::RankLost`] once another rank has ended.
pub trait Exchange: fmt::Debug + Send + Sync {
    /// Returns the rank of this process.
    fn rank_info(&self) -> RankInfo;

    /// Prepares swaps of buffers on this device.
    ///
    /// # Errors
    /// [`TrainerError::Request`] says what swaps on this device lack.
    fn connect(&self, device: &Device) -> Result<()>;

    /// Begins to send parts of buffers to other ranks and to receive others from them, concurrently with what is
    /// computed until [`Exchange::end_swap`]. The parts for a rank are sent in the order in which that rank lists them
    /// as received. Until the end nothing may write what is sent, or use what is received. On a GPU the swap begins
    /// after everything launched before.
    fn begin_swap(&self, outgoing: &[Parcel], incoming: &[Parcel]) -> Result<()>;

    /// Ends the swap that has begun: everything after this can use the received parts. On a GPU only the compute stream
    /// waits.
    fn end_swap(&self) -> Result<()>;

    /// Calls [`Exchange::begin_swap`], then [`Exchange::end_swap`].
    fn swap(&self, outgoing: &[Parcel], incoming: &[Parcel]) -> Result<()> {
        self.begin_swap(outgoing, incoming)?;
        self.end_swap()
    }

    /// Replaces numbers by their sums over all ranks, added in the order of the ranks: every rank gets the same bits.
    fn sum(&self, numbers: &mut [f64]) -> Result<()>;

    /// Returns the texts of all ranks, in their order.
    fn gather(&self, text: &str) -> Result<Vec<String>>;
}

/// The ranks of a run. A process that trains alone exchanges nothing.
#[derive(Clone, Debug, Default)]
pub struct Ranks(Option<Arc<TimedExchange>>);

/// A rank's vote before a step. All ranks do the last of these, in their order here, that any of them votes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    /// Compute the step.
    Compute,
    /// Compute the step, then save: a signal asks for it.
    Save,
    /// Stop before it, for this reason.
    Stop(StopReason),
    /// End with an error after saving: its data cannot be read.
    Fail,
    /// End with an error after saving: the ranks differ in what they can read. No rank votes for it.
    Differ,
}

impl Vote {
    const ALL: [Self; 8] = {
        let [hang_up, time_limit, cpu_limit, interrupt, terminate] = StopReason::ALL;
        [
            Self::Compute,
            Self::Save,
            Self::Stop(hang_up),
            Self::Stop(time_limit),
            Self::Stop(cpu_limit),
            Self::Stop(interrupt),
            Self::Stop(terminate),
            Self::Fail,
        ]
    };
}

impl Ranks {
    /// The ranks of a process that trains alone.
    pub const ONE: Self = Self(None);

    /// Returns the ranks that `exchange` connects.
    pub fn new(exchange: Arc<dyn Exchange>) -> Self {
        Self(Some(Arc::new(TimedExchange::new(exchange))))
    }

    /// Returns the rank of this process.
    pub fn rank_info(&self) -> RankInfo {
        self.0.as_ref().map_or_else(RankInfo::default, |exchange| exchange.rank_info())
    }

    /// Returns the exchange between the ranks; None where there is only one.
    pub fn exchange(&self) -> Option<&dyn Exchange> {
        self.0.as_deref().map(|exchange| exchange as &dyn Exchange)
    }

    /// Returns the time spent in exchange so far that no computation overlaps, the wait for other ranks included; None
    /// where there is only one. On a GPU it waits for the swaps that have ended.
    pub fn exchange_time(&self) -> Result<Option<Duration>> {
        self.0.as_ref().map(|exchange| exchange.time()).transpose()
    }

    /// Calls [`Exchange::sum`]; for one process the numbers stay as they are.
    pub fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        self.exchange().map_or(Ok(()), |exchange| exchange.sum(numbers))
    }

    /// Exchanges the ranks' votes, and returns what all of them do: [`Vote::Differ`] if they would compute the step and
    /// `state` is not the same text on all of them.
    pub fn agree(&self, own: Vote, state: &str) -> Result<Vote> {
        let Some(exchange) = self.exchange() else { return Ok(own) };
        let votes = Vote::ALL.map(|choice| f64::from(u8::from(own == choice)));
        // Sums of integers below 2^53 are exact. Over ranks whose numbers differ, the squares sum to more than the mean's:
        // by at least 1 / 2.
        let hash = Sha256::digest(state);
        let number = f64::from(u32::from_be_bytes([0, hash[0], hash[1], hash[2]]) >> 4);
        let mut sums = [&votes[..], &[number, number * number]].concat();
        exchange.sum(&mut sums)?;
        let (votes, state) = sums.split_at(votes.len());
        let ranks = exchange.rank_info().world_size as f64;
        let differ = ranks * state[1] - state[0] * state[0] > 0.5;
        let vote = Vote::ALL.into_iter().zip(votes.to_vec()).rfind(|(_, votes)| *votes > 0.0);
        Ok(match vote.map_or(own, |(choice, _)| choice) {
            Vote::Compute | Vote::Save if differ => Vote::Differ,
            choice => choice,
        })
    }

    /// Checks that values by name are the same on all ranks.
    ///
    /// # Errors
    /// [`TrainerError::Request`] names the first that differs, with its values.
    pub fn require_equal(&self, facts: &BTreeMap<String, Value>) -> Result<()> {
        let Some(exchange) = self.exchange() else { return Ok(()) };
        let own = Value::Object(facts.clone().into_iter().collect()).to_string();
        let parsed = |text: &String| serde_json::from_str(text).unwrap_or_default();
        let all: Vec<BTreeMap<String, Value>> = exchange.gather(&own)?.iter().map(parsed).collect();
        let value_text =
            |facts: &BTreeMap<String, Value>, name: &str| facts.get(name).map_or("unset".into(), Value::to_string);
        for (rank, other) in all.iter().enumerate().skip(1) {
            let names = all[0].keys().chain(other.keys());
            if let Some(name) = names.clone().find(|name| all[0].get(*name) != other.get(*name)) {
                let (first, other) = (value_text(&all[0], name), value_text(other, name));
                return Err(TrainerError::Request(format!(
                    "the ranks differ: {name} is {first} on rank 0 and {other} on rank {rank}. Start every rank with the \
                     same version, config and files"
                )));
            }
        }
        Ok(())
    }
}
