/* A trace function that has a Ctrl-C pending at once, once: none written in Python could, as CPython would raise
 * KeyboardInterrupt in that function. Called through ctypes.PyDLL, with the GIL. */
extern void PyErr_SetInterrupt(void);

int armed = 0;

void interrupt(void *frame, void *event, void *argument) {
  (void)frame, (void)event, (void)argument;
  if (armed) {
    armed = 0;
    PyErr_SetInterrupt();
  }
}
