//! The ranks of a data-parallel run: processes that train one model together, each on its own micro-batches of every
//! step, each with its own shard of the optimizer's state (ZeRO-1, Rajbhandari et al. 2020).
//!
//! The training loop decides what is exchanged and when; an [`Exchange`] moves it. Ranks are no part of what is
//! computed: a step has the same micro-batches whatever their number, so that losses differ by rounding only.

mod meter;
mod timed;

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc, time::Duration};

use kernels::{Buffer, Device};
use serde_json::Value;

pub use self::meter::{RankFigures, RankMeter};
use self::timed::TimedExchange;
use crate::{
    error::{Result, TrainerError},
    signal::Signal,
};

/// Which of the processes that train a model this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// From 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// From 0, among the ranks on this machine.
    pub local_rank: usize,
    /// Ranks on this machine, which share its memory.
    pub local_world_size: usize,
}

impl Default for RankInfo {
    /// The only process.
    fn default() -> Self {
        Self { rank: 0, world_size: 1, local_rank: 0, local_world_size: 1 }
    }
}

impl RankInfo {
    /// This rank's share of `count` things, in the order of the ranks: all of them between the ranks, each once.
    pub fn share(&self, count: usize) -> Range<usize> {
        let start_of = |rank: usize| count * rank / self.world_size;
        start_of(self.rank)..start_of(self.rank + 1)
    }

    /// Whether it writes what a run writes.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }
}

/// A part of a buffer, of one dimension and not empty, and the rank that it goes to or comes from.
pub type Parcel = (usize, Buffer);

/// Moves data between the ranks. Every rank calls the same methods in the same order; each waits for all ranks.
///
/// # Errors
/// Every method fails with [`TrainerError::RankLost`] once another rank has ended.
pub trait Exchange: fmt::Debug + Send + Sync {
    /// Which rank this process is.
    fn rank_info(&self) -> RankInfo;

    /// Prepares to swap buffers of this device.
    ///
    /// # Errors
    /// [`TrainerError::Request`] says what is missing for that.
    fn connect(&self, device: &Device) -> Result<()>;

    /// Begins to send parts to other ranks and to receive others from them, beside what is computed until
    /// [`Exchange::end_swap`]. Two ranks send each other parts in the order in which the other one lists them. Until the end
    /// nothing writes what is sent, and nothing uses what is received. On a GPU it begins after everything launched
    /// before.
    fn begin_swap(&self, sent: &[Parcel], received: &[Parcel]) -> Result<()>;

    /// Ends the swap that has begun: its parts are there for everything after this. On a GPU only the compute stream
    /// waits.
    fn end_swap(&self) -> Result<()>;

    /// [`Exchange::begin_swap`] and [`Exchange::end_swap`] in one.
    fn swap(&self, sent: &[Parcel], received: &[Parcel]) -> Result<()> {
        self.begin_swap(sent, received)?;
        self.end_swap()
    }

    /// Adds up numbers in the order of the ranks: every rank gets the same bits.
    fn sum(&self, numbers: &mut [f64]) -> Result<()>;

    /// Gives every rank the texts of all of them, in the order of the ranks.
    fn gather(&self, text: &str) -> Result<Vec<String>>;
}

/// The ranks of a run. A process that trains alone exchanges nothing.
#[derive(Clone, Debug, Default)]
pub struct Ranks(Option<Arc<TimedExchange>>);

/// What a rank is about to do with a step. The last of these that any rank says is what all do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    /// Compute it.
    Compute,
    /// Stop before it, as this signal asks.
    Stop(Signal),
    /// End with an error after saving: its data cannot be read.
    Fail,
}

impl Vote {
    const ALL: [Self; 5] = [
        Self::Compute,
        Self::Stop(Signal::HangUp),
        Self::Stop(Signal::Interrupt),
        Self::Stop(Signal::Terminate),
        Self::Fail,
    ];
}

impl Ranks {
    /// One process.
    pub const ONE: Self = Self(None);

    /// The ranks that this connects.
    pub fn new(exchange: Arc<dyn Exchange>) -> Self {
        Self(Some(Arc::new(TimedExchange::new(exchange))))
    }

    /// Which rank this process is.
    pub fn rank_info(&self) -> RankInfo {
        self.0.as_ref().map_or_else(RankInfo::default, |exchange| exchange.rank_info())
    }

    /// What connects them; none where there is only one.
    pub fn exchange(&self) -> Option<&dyn Exchange> {
        self.0.as_deref().map(|exchange| exchange as &dyn Exchange)
    }

    /// The time spent in exchange so far, the wait for other ranks included, beside no computation; none where there is
    /// only one. On a GPU it waits for the swaps that have ended.
    pub fn exchange_time(&self) -> Result<Option<Duration>> {
        self.0.as_ref().map(|exchange| exchange.time()).transpose()
    }

    /// [`Exchange::sum`]
    pub fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        self.exchange().map_or(Ok(()), |exchange| exchange.sum(numbers))
    }

    /// What all ranks do after they have said what each is about to do.
    pub fn agree(&self, own: Vote) -> Result<Vote> {
        let Some(exchange) = self.exchange() else { return Ok(own) };
        let mut votes = Vote::ALL.map(|choice| f64::from(u8::from(own == choice)));
        exchange.sum(&mut votes)?;
        let voted = Vote::ALL.into_iter().zip(votes).rfind(|(_, votes)| *votes > 0.0);
        Ok(voted.map_or(own, |(choice, _)| choice))
    }

    /// Makes sure that facts by name are the same on all ranks.
    ///
    /// # Errors
    /// [`TrainerError::Request`] names the first that differs, with its values.
    pub fn require_equal(&self, facts: &BTreeMap<String, Value>) -> Result<()> {
        let Some(exchange) = self.exchange() else { return Ok(()) };
        let own = Value::Object(facts.clone().into_iter().collect()).to_string();
        let parsed = |text: &String| serde_json::from_str(text).unwrap_or_default();
        let all: Vec<BTreeMap<String, Value>> = exchange.gather(&own)?.iter().map(parsed).collect();
        let shown =
            |facts: &BTreeMap<String, Value>, name: &str| facts.get(name).map_or("unset".into(), Value::to_string);
        for (rank, other) in all.iter().enumerate().skip(1) {
            let names = all[0].keys().chain(other.keys());
            if let Some(name) = names.clone().find(|name| all[0].get(*name) != other.get(*name)) {
                let (first, other) = (shown(&all[0], name), shown(other, name));
                return Err(TrainerError::Request(format!(
                    "the ranks differ: {name} is {first} on rank 0 and {other} on rank {rank}. Start every rank with the \
                     same version, config and files"
                )));
            }
        }
        Ok(())
    }
}
