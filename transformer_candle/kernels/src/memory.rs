//! Memory that is counted before it is allocated: the only allocations of a run.
//!
//! What owns buffers takes them from an [`Arena`] in its constructor. The constructor runs twice: with an arena that
//! counts, which lists the buffers in a [`Plan`] and hands out ones without memory, and with an arena that has the
//! memory of that plan ([`allocate`]).

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

/// A list of buffers, in the order in which constructors take them.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    buffers: Vec<PlannedBuffer>,
}

impl Plan {
    /// Every buffer, in the order taken.
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

    /// Allocates every buffer, all zero. Buffers of one element type are one allocation: on a CPU only large ones lie
    /// in huge pages, on a GPU the driver rounds each one up and no plan counts what lies between them.
    ///
    /// # Errors
    /// On a GPU without room for all of them, [`crate::Error::OutOfMemory`] before the first is allocated.
    pub fn allocate(self, device: &Device) -> Result<Arena> {
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
        let memory = Some(buffers.collect::<Result<_>>()?);
        Ok(Arena { plan: self, memory, first: 0, next: 0 })
    }
}

/// Where constructors take their buffers from: it counts them, or has the memory that was counted.
#[derive(Clone, Debug)]
pub struct Arena {
    plan: Plan,
    /// The memory of each buffer of the plan; None while they are counted.
    memory: Option<Vec<Buffer>>,
    /// The position that [`Arena::rewind`] goes back to.
    first: usize,
    /// The position of the next buffer.
    next: usize,
}

impl Arena {
    /// An arena that counts.
    pub fn counting() -> Self {
        Self { plan: Plan::default(), memory: None, first: 0, next: 0 }
    }

    /// Takes the next buffer, zero the first time. While buffers are counted it has no memory.
    ///
    /// # Panics
    /// If another buffer was counted at this position, or a smaller one.
    pub fn take(&mut self, name: impl Into<String>, category: Category, dtype: DType, shape: &[usize]) -> Buffer {
        let buffer = PlannedBuffer { name: name.into(), category, dtype, shape: shape.to_vec() };
        let position = self.next;
        self.next += 1;
        if let Some(planned) = self.plan.buffers.get(position) {
            assert_eq!((&planned.name, planned.dtype), (&buffer.name, dtype), "buffers are taken in the order counted");
        }
        if let Some(memory) = &self.memory {
            return memory[position].view(0, shape).expect("a buffer as large was counted");
        }
        match self.plan.buffers.get_mut(position) {
            Some(planned) if planned.bytes() >= buffer.bytes() => {}
            Some(planned) => *planned = buffer,
            None => self.plan.buffers.push(buffer),
        }
        Buffer::meta(shape, dtype)
    }

    /// Goes back to the first buffer: what is taken next shares the memory of what was taken before, position by
    /// position. Each is counted as large as the largest buffer taken there.
    pub fn rewind(&mut self) {
        self.next = self.first;
    }

    /// An arena of the same memory, which begins with the next buffer.
    #[must_use]
    pub fn rest(&self) -> Self {
        Self { first: self.next, ..self.clone() }
    }

    /// The buffers counted.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// Returns what a constructor makes, and the buffers that it takes; they have no memory.
///
/// # Errors
/// Those of the constructor.
pub fn count<T, E>(new: impl FnOnce(&mut Arena) -> Result<T, E>) -> Result<(T, Plan), E> {
    let mut arena = Arena::counting();
    let value = new(&mut arena)?;
    Ok((value, arena.plan))
}

/// Counts the buffers that a constructor takes, allocates them, and returns what it makes of them.
///
/// ```
/// use kernels::memory::{Category, allocate};
/// use kernels::{DType, Device, Error};
///
/// let weights = allocate(&Device::Cpu, |arena| {
///     Ok::<_, Error>(arena.take("weights", Category::Weights, DType::F32, &[1000, 64]))
/// })?;
/// assert_eq!(weights.shape(), [1000, 64]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// Those of the constructor and of [`Plan::allocate`].
pub fn allocate<T, E: From<crate::Error>>(
    device: &Device,
    mut new: impl FnMut(&mut Arena) -> Result<T, E>,
) -> Result<T, E> {
    let (_, plan) = count(&mut new)?;
    new(&mut plan.allocate(device)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_of(new: impl FnOnce(&mut Arena)) -> Plan {
        let mut arena = Arena::counting();
        new(&mut arena);
        arena.plan
    }

    #[test]
    fn a_plan_sums_its_categories_in_order() {
        let new = |arena: &mut Arena| {
            arena.take("moments", Category::OptimizerMoments, DType::F32, &[2, 100]);
            let weights = arena.take("weights", Category::Weights, DType::BF16, &[100]);
            arena.take("low_bits", Category::MasterLowBits, DType::I16, &[100]);
            arena.take("more weights", Category::Weights, DType::F32, &[1]);
            Ok::<_, crate::Error>(weights)
        };
        let (weights, plan) = count(new).unwrap();
        assert_eq!(plan.bytes(), 800 + 200 + 200 + 4);
        assert_eq!(
            plan.by_category(),
            [(Category::Weights, 204), (Category::MasterLowBits, 200), (Category::OptimizerMoments, 800)]
        );
        assert!(weights.view(50, &[5, 10]).unwrap().is_meta() && weights.view(50, &[51]).is_err());
        assert!(weights.read_f32().unwrap_err().to_string().contains("counted, not allocated"));
        let mut arena = plan.allocate(&Device::Cpu).unwrap();
        let mut one = new(&mut arena).unwrap();
        one.write(&[crate::bf16::ONE; 100]).unwrap();
        arena.rewind();
        assert_eq!(new(&mut arena).unwrap().read_f32().unwrap(), [1.0; 100], "both share the arena's memory");
    }

    #[test]
    fn buffers_on_a_cpu_begin_at_cache_lines_and_share_no_element() {
        let sizes = (0..40).map(|i| [i % 7 * 5, 1 + i * i % 11]);
        let types = [DType::F32, DType::BF16, DType::I32].into_iter().cycle();
        let shapes: Vec<_> = sizes.zip(types).collect();
        let take = |arena: &mut Arena| {
            let take = |(shape, dtype): &([usize; 2], DType)| arena.take("", Category::Scratch, *dtype, shape);
            Ok::<Vec<Buffer>, crate::Error>(shapes.iter().map(take).collect())
        };
        let mut ranges = Vec::new();
        for (buffer, (shape, dtype)) in allocate(&Device::Cpu, take).unwrap().iter().zip(&shapes) {
            assert_eq!((buffer.shape(), buffer.dtype()), (&shape[..], *dtype));
            assert_eq!(buffer.address() % CACHE_LINE, 0);
            ranges.push(buffer.address()..buffer.address() + buffer.elements() * dtype.size_in_bytes());
        }
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
    }

    #[test]
    fn a_rewound_arena_holds_buffers_of_other_sizes() {
        let take = |arena: &mut Arena, tokens: usize, workspace: usize| {
            arena.rewind();
            [
                arena.take("weights", Category::Weights, DType::F32, &[100]),
                arena.take("output", Category::SavedActivations, DType::BF16, &[tokens, 8]),
                arena.take("workspace", Category::Scratch, DType::F32, &[workspace]),
            ]
        };
        let buffers = |arena: &mut Arena| [take(arena, 64, 500), take(arena, 128, 300)];
        let mut counting = Arena::counting();
        buffers(&mut counting);
        assert_eq!(counting.plan().bytes(), 4 * 100 + 2 * 128 * 8 + 4 * 500);
        let mut arena = counting.plan.allocate(&Device::Cpu).unwrap();
        let [short, long] = buffers(&mut arena);
        for (one, other) in short.iter().zip(&long) {
            assert_eq!(one.address(), other.address());
        }
        assert_eq!((short[1].shape(), long[1].shape()), (&[64, 8][..], &[128, 8][..]));
        arena.rewind();
        arena.take("weights", Category::Weights, DType::F32, &[100]);
        let mut rest = arena.rest();
        for _ in 0..2 {
            rest.rewind();
            let output = rest.take("output", Category::SavedActivations, DType::BF16, &[1, 8]);
            assert_eq!(output.address(), long[1].address());
        }
    }

    #[test]
    #[should_panic(expected = "a buffer as large was counted")]
    fn a_buffer_larger_than_counted_is_a_bug() {
        let plan = plan_of(|arena| drop(arena.take("", Category::Scratch, DType::F32, &[3])));
        plan.allocate(&Device::Cpu).unwrap().take("", Category::Scratch, DType::F32, &[4]);
    }

    #[test]
    fn a_type_that_no_buffer_holds_is_an_error() {
        for dtype in [DType::F64, DType::F4] {
            let plan = plan_of(|arena| drop(arena.take("", Category::Scratch, dtype, &[3])));
            assert!(plan.allocate(&Device::Cpu).is_err());
        }
    }

    #[test]
    fn a_plan_of_more_bytes_than_any_machine_has_can_be_summed() {
        let mut arena = Arena::counting();
        arena.take("logits", Category::Scratch, DType::F32, &[1 << 30, 1 << 20]);
        assert_eq!(arena.plan().bytes(), 1 << 52);
        arena.take("cache", Category::KeyValueCache, DType::F32, &[1 << 40, 1 << 40]);
        assert_eq!(arena.plan().bytes(), u64::MAX);
    }
}
