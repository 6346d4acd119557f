//! The numbers of a report with their names in metrics and TensorBoard.

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::{EvaluationReport, SampleReport, StepReport, UtilizationReport};

/// A logged number.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum Number {
    /// A count.
    Integer(u64),
    /// A 32-bit number, written as the shortest decimal that reads back as the same number.
    F32(f32),
    /// A 64-bit number.
    F64(f64),
}

impl Number {
    /// Converts the number for a sink that knows only one type.
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Integer(value) => value as f64,
            Self::F32(value) => value.into(),
            Self::F64(value) => value,
        }
    }
}

impl From<u64> for Number {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<f32> for Number {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::F64(value)
    }
}

/// A number of a report with its names.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    /// Its key in `metrics.jsonl`, `--json` and Python.
    pub key: &'static str,
    /// Its tag in TensorBoard; `None` if it is not drawn.
    pub tag: Option<&'static str>,
    /// The number; `None` if unknown, such as MFU on a CPU.
    pub value: Option<Number>,
}

impl Scalar {
    /// Returns a number that TensorBoard draws as a curve under `tag`.
    pub(super) fn curve(key: &'static str, tag: &'static str, value: impl Into<Number>) -> Self {
        Self { key, tag: Some(tag), value: Some(value.into()) }
    }

    /// Returns a number that TensorBoard draws as a curve, with gaps where it is unknown.
    pub(super) fn optional_curve(key: &'static str, tag: &'static str, value: Option<impl Into<Number>>) -> Self {
        Self { key, tag: Some(tag), value: value.map(Into::into) }
    }

    /// Returns a number that TensorBoard does not draw.
    pub(super) fn plain(key: &'static str, value: impl Into<Number>) -> Self {
        Self { key, tag: None, value: Some(value.into()) }
    }

    /// Returns a number that TensorBoard does not draw and that may be unknown.
    pub(super) fn optional_plain(key: &'static str, value: Option<impl Into<Number>>) -> Self {
        Self { key, tag: None, value: value.map(Into::into) }
    }
}

/// A number of each rank. TensorBoard does not draw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its key in `metrics.jsonl`, `--json` and Python.
    pub key: &'static str,
    /// One value per rank, in their order.
    pub values: Vec<f64>,
}

/// A text of a report with its names.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// Its key in `metrics.jsonl`, `--json` and Python.
    pub key: &'static str,
    /// The text; `None` if there is none, such as the reason of a GPU that is not throttled.
    pub value: Option<String>,
}

impl Text {
    /// Returns a text with a value.
    pub(super) fn new(key: &'static str, value: impl Into<String>) -> Self {
        Self { key, value: Some(value.into()) }
    }
}

/// A text that TensorBoard shows.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownText {
    /// Its tag in TensorBoard.
    pub tag: String,
    /// The text, which is plain and not Markdown.
    pub text: String,
}

/// The numbers of one component of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct ComponentRecord {
    /// The component's name, which a sink without nesting appends to each tag.
    pub name: String,
    /// Its numbers.
    pub scalars: Vec<Scalar>,
}

/// The record of a report for every sink. It serializes as the report's fields, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// `train`, `evaluation`, `utilization`, `data`, `stage`, `sample`, `advice` or `end`.
    pub kind: &'static str,
    /// Optimizer steps taken.
    pub step: u64,
    /// All numbers but the step.
    pub scalars: Vec<Scalar>,
    /// Numbers of each rank; empty where there is one.
    pub series: Vec<Series>,
    /// Numbers of each component of a mixture; empty without one.
    pub components: Vec<ComponentRecord>,
    /// All texts.
    pub texts: Vec<Text>,
    /// The text that TensorBoard shows; not serialized.
    pub shown_text: Option<ShownText>,
}

impl Record {
    pub(crate) fn new(kind: &'static str, step: u64) -> Self {
        Self { kind, step, ..Self::default() }
    }
}

fn serialize_scalars<M: SerializeMap>(scalars: &[Scalar], map: &mut M) -> Result<(), M::Error> {
    scalars.iter().try_for_each(|scalar| map.serialize_entry(scalar.key, &scalar.value))
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &self.step)?;
        serialize_scalars(&self.scalars, &mut map)?;
        self.series.iter().try_for_each(|series| map.serialize_entry(series.key, &series.values))?;
        if !self.components.is_empty() {
            map.serialize_entry("components", &self.components)?;
        }
        self.texts.iter().try_for_each(|text| map.serialize_entry(text.key, &text.value))?;
        map.end()
    }
}

/// Serializes reports as their records.
macro_rules! serialize_as_record {
    ($($report:ty),*) => {
        $(impl Serialize for $report {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.record().serialize(serializer)
            }
        })*
    };
}

serialize_as_record!(StepReport, EvaluationReport, SampleReport, UtilizationReport);

impl Serialize for ComponentRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        serialize_scalars(&self.scalars, &mut map)?;
        map.end()
    }
}
