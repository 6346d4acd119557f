//! Values of the trainer as classes of Python.

use crate::json;

/// Defines a frozen class around a value: a read-only attribute per field that is listed, and `to_dict`, which has all of
/// them as JSON would. Methods of its own may follow.
macro_rules! value_class {
    (
        $(#[$about:meta])*
        $class:ident($value:ty) {
            $($(#[$text:meta])* $field:ident: $type:ty,)*
        }
        $($methods:tt)*
    ) => {
        $(#[$about])*
        #[pyclass(frozen, module = "orchestrator._native")]
        pub struct $class($value);

        impl From<$value> for $class {
            fn from(value: $value) -> Self {
                Self(value)
            }
        }

        #[pymethods]
        impl $class {
            $(
                $(#[$text])*
                #[getter]
                fn $field(&self) -> $type {
                    $crate::values::Attribute::attribute(&self.0.$field)
                }
            )*

            /// Everything as plain values.
            fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                $crate::json::to_python(py, &self.0)
            }

            $($methods)*
        }
    };
}
pub(crate) use value_class;

/// A field as Python gets it.
pub trait Attribute<T> {
    /// The attribute's value.
    fn attribute(&self) -> T;
}

impl<T: Clone> Attribute<T> for T {
    fn attribute(&self) -> T {
        self.clone()
    }
}

impl Attribute<f64> for f32 {
    fn attribute(&self) -> f64 {
        json::shortest(*self)
    }
}
