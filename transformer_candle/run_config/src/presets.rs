//! The configs that the program carries with it: `configs/*.yaml`.

/// A config that the program carries with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// Its name, such as `rtx5090_1b`.
    pub name: &'static str,
    /// The text of `configs/NAME.yaml`.
    pub text: &'static str,
}

static PRESETS: [Preset; 3] = [
    Preset { name: "smoke_cpu", text: include_str!("../../../configs/smoke_cpu.yaml") },
    Preset { name: "rtx5090_500m", text: include_str!("../../../configs/rtx5090_500m.yaml") },
    Preset { name: "rtx5090_1b", text: include_str!("../../../configs/rtx5090_1b.yaml") },
];

/// The configs that the program carries with it, smallest first.
pub fn presets() -> &'static [Preset] {
    &PRESETS
}
