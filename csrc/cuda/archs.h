// Which GPUs a library has machine code for.
#pragma once

namespace scaledot {

// `archs`: as in "sm_80;compute_80;sm_90a". `capability`: 90 for 9.0. Machine code runs on GPUs of its major version
// and at least its minor version, or with an "a" on this one alone. Otherwise CUDA's driver has to compile PTX
// ("compute_80").
inline bool has_machine_code(const char* archs, int capability) {
  for (const char* word = archs; *word;) {
    const bool is_code = word[0] == 's';  // sm_80, not compute_80
    int number = 0;
    while (*word && *word != ';' && !(*word >= '0' && *word <= '9')) ++word;
    for (; *word >= '0' && *word <= '9'; ++word) number = 10 * number + (*word - '0');
    const bool runs = *word == 'a' ? number == capability : number / 10 == capability / 10 && number <= capability;
    if (is_code && runs) return true;
    while (*word && *word != ';') ++word;
    if (*word) ++word;
  }
  return false;
}

}  // namespace scaledot
