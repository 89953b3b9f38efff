// Methods that no Ctrl-C gets past.
//
// CPython raises KeyboardInterrupt at its own check points, and one of them is the first instruction of every Python
// function: in front of any `try` in it. So no `__exit__` written in Python can be sure to close its scope. These are not
// written in Python: what comes out of `body` in any other way than a result is handed to `rescue`, before it goes on.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace gpurelease {

// Raises `error` again, once `rescue(self, error)` has heard of it.
[[noreturn]] inline void rescued(const py::object& rescue, const py::handle& self, py::error_already_set& error) {
  rescue(self, error.value());
  throw error;
}

// The coroutine of an `async def`: its first instruction is such a check point too.
class Guarded {
 public:
  Guarded(py::object coroutine, py::object rescue, py::object self)
      : coroutine_(std::move(coroutine)), rescue_(std::move(rescue)), self_(std::move(self)) {}

  py::object send(const py::object& value) { return step("send", py::make_tuple(value)); }

  py::object step(const char* how, const py::args& arguments) {
    try {
      return coroutine_.attr(how)(*arguments);
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_StopIteration)) throw;  // it is done
      rescued(rescue_, self_, error);
    }
  }

 private:
  py::object coroutine_, rescue_, self_;
};

// Returns a method that calls `body(self, ...)`; where that is an `async def`, to be awaited.
inline py::object guarded(py::object body, py::object rescue, bool awaited) {
  return py::cpp_function(
      [body = std::move(body), rescue = std::move(rescue), awaited](
          const py::object& self, const py::args& arguments) -> py::object {
        try {
          auto result = body(self, *arguments);
          return awaited ? py::cast(Guarded(std::move(result), rescue, self)) : result;
        } catch (py::error_already_set& error) {
          rescued(rescue, self, error);
        }
      },
      py::is_method(py::none()));
}

inline void define_guarded(py::module& m) {
  py::class_<Guarded>(m, "Guarded")
      .def("__await__", [](py::object self) { return self; })
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", [](Guarded& g) { return g.send(py::none()); })
      .def("send", &Guarded::send)
      .def("throw", [](Guarded& g, const py::args& error) { return g.step("throw", error); })
      .def("close", [](Guarded& g) { return g.step("close", py::args()); });
  m.def("guarded", &guarded, py::arg("body"), py::arg("rescue"), py::arg("awaited"));
}

}  // namespace gpurelease
