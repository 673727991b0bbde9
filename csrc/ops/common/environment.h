// The environment variables that the libraries read. A value that a variable does not have gets one warning: in Python
// at import, which takes the warnings; in a C++ program at its first call.
#pragma once

#include <string>
#include <vector>

namespace scaledot {

// Whether calls save something for their backward until set_save_for_backward is called.
bool save_for_backward_at_start();

// The warnings, for the first caller; later ones get none.
std::vector<std::string> take_environment_warnings();

// Gives the warnings that nobody has taken.
void warn_of_environment();

}  // namespace scaledot
