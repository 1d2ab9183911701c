'use strict';
// The addon, which lies beside this file in the package, one for each processor.

const { makeError } = require('./errors.js');

const native = require(`./pelton.linux-${process.arch}.node`);
native.initialize(makeError);

module.exports = native;
