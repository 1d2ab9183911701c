'use strict';

/** The middle one of some figures. */
function median(figures) {
  return [...figures].sort((a, b) => a - b)[Math.floor(figures.length / 2)];
}

module.exports = { median };
