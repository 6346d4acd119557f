//! How much memory a run may take.

use std::fmt;

use run_config::{ByteSize, RunConfig};
use serde::Serialize;

use super::machine::available_memory;

/// As `nvidia-smi` reports it.
const RTX_5090: ByteSize = ByteSize(32_607 << 20);
/// Share of a card's memory that its driver and the page tables leave.
const USABLE_SHARE_OF_CARD: f64 = 0.98;
/// What a CUDA context with its libraries takes of a card.
const CUDA_CONTEXT_BYTES: u64 = 600_000_000;
/// What the program takes on a CPU besides its planned buffers: code, tokenizer, threads.
const HOST_BASE_BYTES: u64 = 256 << 20;
/// Text and tokens of a document in the windows being shuffled and prepared; FineWeb's mean is 3 KB of text.
const HOST_BYTES_PER_SHUFFLED_DOCUMENT: u64 = 8 << 10;

/// An amount of memory and where the number comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// What the planned buffers may take.
    pub bytes: u64,
    /// Such as `runtime.memory_limit: 24GB`.
    pub origin: String,
}

impl Budget {
    /// What a plan may take: `runtime.memory_limit` where it is given, else an RTX 5090 for runs that are meant for a card,
    /// else what this machine has free. None where the system does not tell.
    pub(super) fn of_config(config: &RunConfig, for_card: bool) -> Option<Self> {
        match (config.runtime.memory_limit, for_card) {
            (Some(limit), true) => Some(Self::of_card(limit, &format!("runtime.memory_limit: {limit}"))),
            (Some(limit), false) => Some(Self::of_limit(limit)),
            (None, true) => Some(Self::of_card(RTX_5090, &format!("an RTX 5090, assumed: {RTX_5090}"))),
            (None, false) => Self::of_machine(config),
        }
    }

    /// What a trainer may take on this machine's CPU: the smaller of the limit and what is free.
    pub(super) fn here(config: &RunConfig) -> Option<Self> {
        let limit = config.runtime.memory_limit.map(Self::of_limit);
        limit.into_iter().chain(Self::of_machine(config)).min_by_key(|budget| budget.bytes)
    }

    fn of_card(memory: ByteSize, origin: &str) -> Self {
        let usable = (memory.bytes() as f64 * USABLE_SHARE_OF_CARD) as u64;
        let bytes = usable.saturating_sub(CUDA_CONTEXT_BYTES);
        Self { bytes, origin: format!("{origin}, less what the driver and its libraries take") }
    }

    fn of_limit(limit: ByteSize) -> Self {
        Self { bytes: limit.bytes(), origin: format!("runtime.memory_limit: {limit}") }
    }

    fn of_machine(config: &RunConfig) -> Option<Self> {
        let reserve = HOST_BASE_BYTES + config.data.shuffle_buffer_size as u64 * HOST_BYTES_PER_SHUFFLED_DOCUMENT;
        let bytes = available_memory()?.saturating_sub(reserve);
        Some(Self { bytes, origin: "free on this machine, less what the data stream needs".into() })
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", super::display::bytes(self.bytes), self.origin)
    }
}
