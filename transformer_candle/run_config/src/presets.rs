//! The configs that the program carries with it: `configs/*.yaml`.

/// A config that the program carries with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// The preset's name, such as `1b`.
    pub name: &'static str,
    /// The text of `configs/NAME.yaml`.
    pub text: &'static str,
}

static PRESETS: [Preset; 8] = [
    Preset { name: "smoke_cpu", text: include_str!("../../../configs/smoke_cpu.yaml") },
    Preset { name: "25m", text: include_str!("../../../configs/25m.yaml") },
    Preset { name: "125m", text: include_str!("../../../configs/125m.yaml") },
    Preset { name: "350m", text: include_str!("../../../configs/350m.yaml") },
    Preset { name: "500m", text: include_str!("../../../configs/500m.yaml") },
    Preset { name: "rtx5090_500m", text: include_str!("../../../configs/rtx5090_500m.yaml") },
    Preset { name: "1b", text: include_str!("../../../configs/1b.yaml") },
    Preset { name: "rtx5090_1b", text: include_str!("../../../configs/rtx5090_1b.yaml") },
];

/// The configs that the program carries with it, smallest first. Those named after a GPU are the first version's, with
/// its sizes and `AdamW`.
pub fn presets() -> &'static [Preset] {
    &PRESETS
}
