//! The memory plan: every buffer of a run, listed before the first one is allocated.

use std::collections::HashMap;
use std::fmt;

use candle_core::DType;

use crate::buffer::CACHE_LINE;
use crate::{Buffer, Device, Result};

/// Gap in bytes after each buffer in CPU memory: an odd number of cache lines. Buffers whose sizes are powers of two,
/// read by one operation, would otherwise map to the same cache sets.
const CPU_GAP: usize = 17 * CACHE_LINE;
/// Alignment in bytes of buffers in GPU memory: that of the driver's own allocations, and more than the kernels need.
const GPU_ALIGNMENT: usize = 256;

/// The purpose of a buffer, in the order that a plan prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters, in the dtype that GEMMs read.
    Weights,
    /// The low 16 bits of the f32 master weights, beside bf16 weights.
    MasterLowBits,
    /// The f32 accumulators of the weights' gradients.
    Gradients,
    /// The optimizer's f32 state: `AdamW`'s two moments, Muon's momentum.
    OptimizerMoments,
    /// Activations that the forward pass keeps for the backward pass.
    SavedActivations,
    /// Intermediate values and workspaces.
    Scratch,
    /// Token ids and targets of a micro-batch.
    Batch,
    /// Keys and values of the tokens generated so far.
    KeyValueCache,
}

impl fmt::Display for Category {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Weights => "weights",
            Self::MasterLowBits => "master low bits",
            Self::Gradients => "gradients",
            Self::OptimizerMoments => "optimizer moments",
            Self::SavedActivations => "saved activations",
            Self::Scratch => "scratch",
            Self::Batch => "batch",
            Self::KeyValueCache => "key/value cache",
        })
    }
}

/// A buffer of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedBuffer {
    /// A name for people, such as `layers.3.normed`.
    pub name: String,
    /// The purpose of the buffer.
    pub category: Category,
    /// The element type.
    pub dtype: DType,
    /// The sizes of the axes.
    pub shape: Vec<usize>,
}

impl PlannedBuffer {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        let size = self.dtype.size_in_bytes() as u64;
        self.shape.iter().fold(size, |bytes, &size| bytes.saturating_mul(size as u64))
    }

    /// Elements from its start to the next buffer's; 0 for sub-byte types, which no buffer holds.
    fn spaced_elements(&self, device: &Device) -> usize {
        let bytes = self.shape.iter().product::<usize>() * self.dtype.size_in_bytes();
        let spaced = match device {
            Device::Cpu => bytes.next_multiple_of(CACHE_LINE) + CPU_GAP,
            Device::Cuda(_) => bytes.next_multiple_of(GPU_ALIGNMENT),
        };
        spaced.checked_div(self.dtype.size_in_bytes()).unwrap_or(0)
    }
}

/// A buffer of a [`Plan`] and of the [`Arena`] that the plan allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(usize);

/// A list of buffers; allocating it is the only allocation of a run.
///
/// ```
/// use kernels::memory::{Category, Plan};
/// use kernels::{DType, Device};
///
/// let mut plan = Plan::new();
/// let weights = plan.add("weights", Category::Weights, DType::F32, &[1000, 64]);
/// assert_eq!(plan.bytes(), 256_000);
/// let arena = plan.allocate(&Device::Cpu)?;
/// assert_eq!(arena.buffer(weights).shape(), [1000, 64]);
/// # Ok::<(), kernels::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Plan {
    buffers: Vec<PlannedBuffer>,
}

impl Plan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer.
    pub fn add(&mut self, name: impl Into<String>, category: Category, dtype: DType, shape: &[usize]) -> BufferId {
        self.buffers.push(PlannedBuffer { name: name.into(), category, dtype, shape: shape.to_vec() });
        BufferId(self.buffers.len() - 1)
    }

    /// Every buffer, in the order added.
    pub fn buffers(&self) -> &[PlannedBuffer] {
        &self.buffers
    }

    /// Size of all buffers in bytes, saturating.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().fold(0, |bytes, buffer| bytes.saturating_add(buffer.bytes()))
    }

    /// Size of the buffers of one category.
    pub fn bytes_of(&self, category: Category) -> u64 {
        self.buffers.iter().filter(|buffer| buffer.category == category).map(PlannedBuffer::bytes).sum()
    }

    /// Size of each category that has a buffer, in the categories' order.
    pub fn by_category(&self) -> Vec<(Category, u64)> {
        let mut categories: Vec<Category> = self.buffers.iter().map(|buffer| buffer.category).collect();
        categories.sort_unstable();
        categories.dedup();
        categories.into_iter().map(|category| (category, self.bytes_of(category))).collect()
    }

    /// A plan in which each buffer is as large as the largest one of its place in any of the plans, which list the same
    /// buffers in other sizes: memory for all of them, one at a time ([`Arena::resized`]).
    ///
    /// # Panics
    /// If the plans do not list the same buffers.
    pub fn largest<'a>(plans: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut plans = plans.into_iter();
        let mut largest = plans.next().cloned().unwrap_or_default();
        for plan in plans {
            assert_eq!(largest.buffers.len(), plan.buffers.len(), "the plans list the same buffers");
            for (largest, buffer) in largest.buffers.iter_mut().zip(&plan.buffers) {
                assert_eq!((&largest.name, largest.dtype), (&buffer.name, buffer.dtype), "in the same order");
                if buffer.bytes() > largest.bytes() {
                    *largest = buffer.clone();
                }
            }
        }
        largest
    }

    /// Allocates every buffer, all zero. Buffers of one element type are one allocation: on a CPU only large ones lie
    /// in huge pages, on a GPU the driver rounds each one up and no plan counts what lies between them.
    ///
    /// # Errors
    /// On a GPU without room for all of them, [`crate::Error::OutOfMemory`] before the first is allocated.
    pub fn allocate(&self, device: &Device) -> Result<Arena> {
        let mut ends = HashMap::<DType, usize>::new();
        let offset_of = |planned: &PlannedBuffer| {
            let end = ends.entry(planned.dtype).or_default();
            let first = *end;
            *end += planned.spaced_elements(device);
            first
        };
        let offsets: Vec<usize> = self.buffers.iter().map(offset_of).collect();
        if let Some(cuda) = device.as_cuda() {
            cuda.require_room(ends.iter().map(|(dtype, end)| (end * dtype.size_in_bytes()) as u64).sum())?;
        }
        let allocate = |(dtype, end)| Ok((dtype, Buffer::zeros(&[end], dtype, device)?));
        let allocations = ends.into_iter().map(allocate).collect::<Result<HashMap<_, _>>>()?;
        let buffers = self.buffers.iter().zip(offsets);
        let buffers = buffers.map(|(planned, first)| allocations[&planned.dtype].view(first, &planned.shape));
        Ok(Arena { buffers: buffers.collect::<Result<_>>()?, bytes: self.bytes() })
    }
}

/// The memory of a [`Plan`]; clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    buffers: Vec<Buffer>,
    bytes: u64,
}

impl Arena {
    /// A buffer, sharing the arena's memory.
    ///
    /// # Panics
    /// If the id comes from a plan with more buffers than the one that allocated this arena.
    pub fn buffer(&self, id: BufferId) -> Buffer {
        self.buffers[id.0].clone()
    }

    /// The buffers of a plan in this arena's memory: each starts where this arena's buffer of the same place does, and
    /// is at most as large ([`Plan::largest`]).
    ///
    /// # Errors
    /// If a buffer is larger.
    pub fn resized(&self, plan: &Plan) -> Result<Self> {
        let buffers = self.buffers.iter().zip(&plan.buffers);
        let buffers = buffers.map(|(buffer, planned)| buffer.view(0, &planned.shape)).collect::<Result<_>>()?;
        Ok(Self { buffers, bytes: plan.bytes() })
    }

    /// Size of all buffers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_sums_its_categories_in_order() {
        let mut plan = Plan::new();
        plan.add("moments", Category::OptimizerMoments, DType::F32, &[2, 100]);
        let weights = plan.add("weights", Category::Weights, DType::BF16, &[100]);
        plan.add("low_bits", Category::MasterLowBits, DType::I16, &[100]);
        plan.add("more weights", Category::Weights, DType::F32, &[1]);
        assert_eq!(plan.bytes(), 800 + 200 + 200 + 4);
        assert_eq!(
            plan.by_category(),
            [(Category::Weights, 204), (Category::MasterLowBits, 200), (Category::OptimizerMoments, 800)]
        );
        let arena = plan.allocate(&Device::Cpu).unwrap();
        assert_eq!(arena.bytes(), plan.bytes());
        let mut one = arena.buffer(weights);
        one.write(&[crate::bf16::ONE; 100]).unwrap();
        assert_eq!(arena.buffer(weights).read_f32().unwrap(), [1.0; 100], "both share the arena's memory");
    }

    #[test]
    fn buffers_on_a_cpu_begin_at_cache_lines_and_share_no_element() {
        let mut plan = Plan::new();
        let sizes = (0..40).map(|i| [i % 7 * 5, 1 + i * i % 11]);
        let types = [DType::F32, DType::BF16, DType::I32].into_iter().cycle();
        let ids: Vec<BufferId> =
            sizes.zip(types).map(|(shape, dtype)| plan.add("", Category::Scratch, dtype, &shape)).collect();
        let arena = plan.allocate(&Device::Cpu).unwrap();
        let mut ranges = Vec::new();
        for (&id, planned) in ids.iter().zip(plan.buffers()) {
            let (buffer, bytes) = (arena.buffer(id), planned.bytes() as usize);
            assert_eq!((buffer.shape(), buffer.dtype()), (&*planned.shape, planned.dtype));
            assert_eq!(buffer.address() % CACHE_LINE, 0);
            ranges.push(buffer.address()..buffer.address() + bytes);
        }
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
    }

    #[test]
    fn one_arena_holds_plans_of_other_sizes() {
        let plan = |tokens: usize, workspace: usize| {
            let mut plan = Plan::new();
            plan.add("weights", Category::Weights, DType::F32, &[100]);
            plan.add("output", Category::SavedActivations, DType::BF16, &[tokens, 8]);
            plan.add("workspace", Category::Scratch, DType::F32, &[workspace]);
            plan
        };
        let (short, long) = (plan(64, 500), plan(128, 300));
        let largest = Plan::largest([&short, &long]);
        assert_eq!(largest.bytes(), 4 * 100 + 2 * 128 * 8 + 4 * 500);
        let arena = largest.allocate(&Device::Cpu).unwrap();
        for plan in [&short, &long] {
            let resized = arena.resized(plan).unwrap();
            assert_eq!(resized.bytes(), plan.bytes());
            for (place, planned) in plan.buffers().iter().enumerate() {
                let (whole, part) = (arena.buffer(BufferId(place)), resized.buffer(BufferId(place)));
                assert_eq!((part.shape(), part.address()), (&*planned.shape, whole.address()));
            }
        }
        assert!(short.allocate(&Device::Cpu).unwrap().resized(&long).is_err(), "it is smaller");
    }

    #[test]
    fn a_type_that_no_buffer_holds_is_an_error() {
        for dtype in [DType::F64, DType::F4] {
            let mut plan = Plan::new();
            plan.add("", Category::Scratch, dtype, &[3]);
            assert!(plan.allocate(&Device::Cpu).is_err());
        }
    }

    #[test]
    fn a_plan_of_more_bytes_than_any_machine_has_can_be_summed() {
        let mut plan = Plan::new();
        plan.add("logits", Category::Scratch, DType::F32, &[1 << 30, 1 << 20]);
        assert_eq!(plan.bytes(), 1 << 52);
        plan.add("cache", Category::KeyValueCache, DType::F32, &[1 << 40, 1 << 40]);
        assert_eq!(plan.bytes(), u64::MAX);
    }
}
