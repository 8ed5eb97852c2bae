// The plans of one unit: see plans.h.
#include "plans.h"
