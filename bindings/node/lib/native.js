'use strict';
// The addon, which lies beside this file in the package.

const { makeError } = require('./errors.js');

const native = require('./pelton.node');
native.initialize(makeError);

module.exports = native;
