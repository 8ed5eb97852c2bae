// Prints the best instruction set of this machine, of those named as arguments, the widest last:
// CMake runs it for FASTATTN_ISAS=native.
#include <cstdio>

#include "isa_choice.h"
#include "isa_here.h"

int main(int count, char** names) {
  std::string here;
  for (int i = 1; i < count; ++i)
    if (std::string(names[i]) != "amx_model" && fa::runs_here(names[i]))
      here = names[i] + (here.empty() ? "" : "," + here);
  std::fputs(fa::order_for(fa::this_chip(), here).isa.c_str(), stdout);
}
