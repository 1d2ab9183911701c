;;;; The C library: loading it, its functions, its codes as conditions, and calling it.
;;;;
;;;; Interrupts: SBCL runs an interrupt in the middle of foreign code. If that unwinds, the library stays in the middle
;;;; of an operation, perhaps with a lock held. So every call runs without interrupts and at most for +SLICE-NS+; longer
;;;; waits sleep in poll(2) with interrupts. The effect of a call is noted before interrupts are served again.

(in-package #:pelton)

;;; ---- Bytes

(deftype octets () "A message: a simple vector of bytes." '(simple-array (unsigned-byte 8) (*)))

(declaim (inline make-octets))
(defun make-octets (size)
  "Returns a vector of SIZE bytes of any value."
  (make-array size :element-type '(unsigned-byte 8)))

(defun sap-octets (sap size)
  "Returns a copy of SIZE bytes at SAP. It reads memory once, so that a peer cannot change what was checked.
Signals TOO-SMALL-ERROR if the heap has no space."
  (declare (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let ((octets (if (< size (ash 1 20)) (make-octets size) (make-large-octets size))))
    (with-pinned-objects (octets)
      (sb-kernel:system-area-ub8-copy sap 0 (vector-sap octets) 0 size))
    octets))

(defun array-data (vector start end)
  "Returns the simple vector behind VECTOR, and where START and END are in it."
  (check-type vector (vector (unsigned-byte 8)))
  (sb-kernel:with-array-data ((data vector) (from start) (to end) :check-fill-pointer t)
    (values data from to)))

(defmacro with-octets-at ((sap size) (octets start end) &body body)
  "Runs BODY with SAP at the SIZE bytes of the vector OCTETS from START to END, which are pinned."
  (let ((vector (gensym "VECTOR")) (data (gensym "DATA")) (from (gensym "FROM")) (to (gensym "TO")))
    `(let ((,vector ,octets) (,from ,start) (,to ,end))
       (multiple-value-bind (,data ,from ,to)
           (if (and (typep ,vector 'octets)
                    (typep ,from 'fixnum)
                    (typep ,to '(or null fixnum))
                    (<= 0 ,from (or ,to (length ,vector)) (length ,vector)))
               (values ,vector ,from (or ,to (length ,vector)))
               (array-data ,vector ,from ,to))
         (declare (type octets ,data) (type (unsigned-byte 62) ,from ,to))
         (with-pinned-objects (,data)
           (let ((,sap (sap+ (vector-sap ,data) ,from)) (,size (- ,to ,from)))
             (declare (type system-area-pointer ,sap) (type (unsigned-byte 62) ,size))
             ,@body))))))

(defun utf-8 (string)
  "Returns the bytes of STRING, followed by a 0, as C wants them."
  (coerce (sb-ext:string-to-octets string :external-format :utf-8 :null-terminate t) 'octets))

;;; ---- Loading the library

(defparameter *checkout*
  #.(let* ((here (or *compile-file-truename* *load-truename*))
           (root (truename (merge-pathnames "../../" (make-pathname :name nil :type nil :version nil :defaults here)))))
      ;; In the package, other people's files are there.
      (and (equal (probe-file (merge-pathnames "bindings/lisp/library.lisp" root)) here) root))
  "The directory of pelton's sources at compile time; NIL in the package.")

(defun library-path ()
  "The library: PELTON_LIBRARY in the environment, or the one built in these sources, or the installed one."
  (let ((named (sb-ext:posix-getenv "PELTON_LIBRARY"))
        (built (and *checkout* (probe-file (merge-pathnames "target/release/libpelton_capi.so" *checkout*)))))
    (cond ((plusp (length named)) named)
          (built (sb-ext:native-namestring built))
          (t "libpelton.so.0.2"))))

(defun load-library ()
  ;; Not saved with an image: a saved image finds and loads it when it starts.
  (handler-case (sb-alien:load-shared-object (library-path) :dont-save t)
    (error (condition)
      (error "~a~%Install libpelton where the linker finds it (then run ldconfig), or name the file in PELTON_LIBRARY."
             condition))))

(load-library)

;;; ---- Constants, structures and functions, from abi.lisp

(deftype word () '(unsigned-byte 64))
(define-alien-type word (unsigned 64))
(define-alien-type address system-area-pointer)
(define-alien-type text (c-string :external-format :utf-8))

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun name (control &rest arguments)
    (intern (string-upcase (apply #'format nil control arguments)) '#:pelton)))

(defmacro define-interface ()
  "Defines the constants +FOREVER+, +SIZEOF-MESSAGE+; the places (MESSAGE.DATA SAP); the functions %SENDER-SEND. A
handle is passed as a word, because a SAP outside of a register conses."
  `(progn
     ,@(loop for (constant number) in *constants*
             collect `(defconstant ,(name "+~a+" constant) ,number))
     ,@(loop for (constant number) in *codes*
             collect `(defconstant ,(name "+~a+" constant) ,number))
     ,@(loop for (structure bytes . fields) in *structures*
             collect `(defconstant ,(name "+sizeof-~a+" structure) ,bytes)
             append (loop for (field offset size) in fields
                          for is-signed = (search "-NS" (symbol-name field))
                          collect `(defmacro ,(name "~a.~a" structure field) (sap)
                                     ,(ecase size
                                        (4 `(list 'sap-ref-32 sap ,offset))
                                        (8 `(list ',(if is-signed 'signed-sap-ref-64 'sap-ref-64) sap ,offset))
                                        ;; An array or a structure.
                                        ((16 32 72) `(list 'sap+ sap ,offset))))))
     ,@(loop for (c-name result . parameters) in *functions*
             for function = (name "%~a" (substitute #\- #\_ (subseq c-name (length "pelton_"))))
             for variables = (mapcar #'first parameters)
             collect `(declaim (inline ,function))
             collect `(defun ,function ,variables
                        ;; Else a caller of the default policy binds a variable around each call, for backtraces through
                        ;; C, which takes a third of a message's time.
                        (declare (optimize (sb-c:alien-funcall-saves-fp-and-pc 0)))
                        (alien-funcall (extern-alien ,c-name (function ,result ,@(mapcar #'second parameters)))
                                       ,@variables)))))

(define-interface)

(declaim (inline %poll))
(defun %poll (fds count milliseconds)
  (alien-funcall (extern-alien "poll" (function int address word int)) fds count milliseconds))

(defun code-text (code)
  "The library's text for a code."
  (without-interrupts (%code-text code)))

(defun check-version ()
  (multiple-value-bind (major rest) (floor (without-interrupts (%version)) 1000000)
    (let ((found (list major (floor rest 1000))) (wanted (subseq *abi-version* 0 2)))
      (unless (equal found wanted)
        (error "libpelton.so has version ~{~d.~d~}, these sources are of version ~{~d.~d~}: install them together, or ~
                name the library in PELTON_LIBRARY"
               found wanted)))))

(check-version)

(defmacro with-words ((sap count) &body body)
  "Runs BODY with SAP at COUNT words of 0 on the stack. A vector of dynamic extent: WITH-ALIEN would bind a special
variable, and each binding costs 2 to 3 ns, because all of them depend on the binding stack's pointer in memory."
  (let ((words (gensym "WORDS")))
    `(let ((,words (make-array ,count :element-type 'word :initial-element 0)))
       (declare (dynamic-extent ,words))
       (with-pinned-objects (,words)
         (let ((,sap (vector-sap ,words))) ,@body)))))

(defmacro with-structure ((sap structure) &body body)
  "Runs BODY with SAP at a zeroed C structure on the stack, whose size is set if it has a field for that."
  (destructuring-bind (bytes &rest fields) (rest (assoc structure *structures*))
    `(with-words (,sap ,(/ bytes 8))
       ,@(when (assoc 'struct-bytes fields) `((setf (,(name "~a.struct-bytes" structure) ,sap) ,bytes)))
       ,@body)))

(defun option-value (value)
  (case value ((t) 1) (:block +block+) (:spin +spin+) (t value)))

(defmacro with-options ((sap structure &rest fields) &body body)
  "Runs BODY with SAP at C options. FIELDS are variables named after fields; NIL leaves a field at its default."
  (let ((vector (gensym "VECTOR")))
    (if (member 'uids fields)
        `(let ((,vector (coerce uids '(simple-array (unsigned-byte 32) (*)))))
           (with-pinned-objects (,vector)
             (with-options (,sap ,structure ,@(remove 'uids fields))
               (setf (,(name "~a.uids" structure) ,sap) (sap-int (vector-sap ,vector))
                     (,(name "~a.uid-count" structure) ,sap) (length ,vector))
               ,@body)))
        `(with-structure (,sap ,structure)
           ,@(loop for field in fields
                   collect `(when ,field
                              (setf (,(name "~a.~a" structure field) ,sap) (the integer (option-value ,field)))))
           ,@body))))

;;; ---- Conditions

(define-condition pelton-error (error)
  ((code :initarg :code :reader pelton-error-code)
   (detail :initarg :detail :initform "" :reader pelton-error-detail)
   (subscriber :initform nil :reader pelton-error-subscriber))
  (:documentation "Every error of pelton. PELTON-ERROR-CODE is the library's number, below 0; PELTON-ERROR-DETAIL says
what was found, what was wanted, and what to do. Each code of the C interface has a subclass named after it:
PEER-DIED-ERROR for PELTON_PEER_DIED; TIMED-OUT for PELTON_AGAIN and PELTON_TIMED_OUT.")
  (:report (lambda (condition stream)
             (format stream "pelton: ~a~:[: ~a~;~]" (code-text (pelton-error-code condition))
                     (equal (pelton-error-detail condition) "") (pelton-error-detail condition)))))

(setf (documentation 'pelton-error-code 'function) "The library's code of a PELTON-ERROR, a negative integer."
      (documentation 'pelton-error-detail 'function)
      "What a PELTON-ERROR found, what it wanted, and what to do: a string, perhaps empty."
      (documentation 'pelton-error-subscriber 'function)
      "Of RECEIVE-FROM-SET: the subscriber whose publisher has left, or NIL.")

(define-condition channel-ended (pelton-error) ()
  (:documentation "The peer has closed, CLOSED-ERROR, or died, PEER-DIED-ERROR."))

(define-condition usage-error (pelton-error) ()
  (:documentation "The program broke a rule of the interface, for instance by using a closed handle."))

(defvar *conditions* (make-hash-table) "The condition of each code.")

(defmacro define-conditions ()
  `(progn
     ,@(loop for (code number text) in *codes*
             for condition = (if (member code '(again timed-out)) 'timed-out (name "~a-error" code))
             for parent = (cond ((member code '(closed peer-died)) 'channel-ended)
                                ((search "caller's mistake" text) 'usage-error)
                                (t 'pelton-error))
             unless (eq code 'timed-out)
               collect `(define-condition ,condition (,parent)
                          ,(case code
                             (system '((errno :initarg :errno :initform 0 :reader system-error-errno)))
                             (sink '((cause :initarg :cause :initform nil :reader sink-error-cause))))
                          (:documentation ,(format nil "PELTON_~a, ~d: ~a." (substitute #\_ #\- (symbol-name code))
                                                   number text)))
             collect `(setf (gethash ,number *conditions*) ',condition))))

(define-conditions)

(define-condition later-version-error (not-a-record-file-error) ()
  (:documentation "A record file that was read so far continues in a later version of the format."))

(setf (documentation 'system-error-errno 'function) "The kernel's error number of a SYSTEM-ERROR."
      (documentation 'sink-error-cause 'function)
      "The condition that a sink in Lisp signalled, or NIL: it was left by a throw, or is not in Lisp.")

(defun make-large-octets (size)
  "As MAKE-OCTETS, for a size that a peer chose: an exhausted heap would end the process."
  (flet ((left () (floor (* 3 (- (sb-ext:dynamic-space-size) (sb-kernel:dynamic-usage))) 4)))
    (when (and (> size (left)) (progn (sb-ext:gc) (> size (left))))
      (error 'too-small-error
             :code +too-small+
             :detail (format nil "the message has ~:d bytes, and the heap has space for ~:d: read it in place, or ~
                                  start sbcl with a larger --dynamic-space-size" size (left))))
    (make-octets size)))

;;; ---- Calling the library

(defun failure (code)
  "The condition for CODE, which a call of this thread has just returned."
  (let ((errno (sb-alien:get-errno)) (detail (%error-detail)) (type (gethash code *conditions* 'pelton-error)))
    (if (eql code +system+)
        (make-condition type :code code :errno errno :detail (if (equal detail "") (sb-int:strerror errno) detail))
        (make-condition type :code code :detail detail))))

(defmacro result (call)
  "Makes CALL. Returns its code, or a condition instead of a code below PELTON_AGAIN. Only where nothing interrupts."
  (let ((code (gensym "CODE")))
    `(let ((,code ,call))
       (declare (type (signed-byte 32) ,code))
       (if (< ,code +again+) (failure ,code) ,code))))

(defmacro attempt (call)
  "As RESULT, without interrupts."
  `(without-interrupts (result ,call)))

(defmacro serving-interrupts (enabled)
  "Enables interrupts again if they were ENABLED, and serves a pending one."
  `(when ,enabled
     (setf *interrupts-enabled* ,enabled)
     (when *interrupt-pending* (sb-unix::receive-pending-interrupt))))

(defun failure-without-interrupts (code enabled)
  (unwind-protect (failure code)
    (serving-interrupts enabled)))

(defmacro briefly (call)
  "As ATTEMPT, for a CALL whose arguments are variables of the right types. Nothing in it unwinds, so it needs no
binding, which would take a third of a message's time."
  (let ((code (gensym "CODE")) (enabled (gensym "ENABLED")))
    `(let* ((,enabled *interrupts-enabled*)
            (,code (progn (setf *interrupts-enabled* nil) ,call)))
       (declare (type (signed-byte 32) ,code))
       (cond ((< ,code +again+) (failure-without-interrupts ,code ,enabled))
             (t (serving-interrupts ,enabled)
                ,code)))))

(defmacro guarding ((at count) body cleanup)
  "Runs BODY and, however it is left, CLEANUP, both without interrupts, except in (INTERRUPTIBLE FORM...) within BODY.
AT is the address of COUNT words, 0 at first, in which C notes what CLEANUP has to undo. It is a fixnum, since a SAP in
a closure conses. INTERRUPTIBLE binds one variable, so that a non-local exit from FORM restores it before CLEANUP runs.
Nothing else is bound: WITHOUT-INTERRUPTS would bind four times."
  (let ((words (gensym "WORDS")) (enabled (gensym "ENABLED")) (allowed (gensym "ALLOWED")))
    `(with-words (,words ,count)
       (let ((,at (ldb (byte 62 0) (sap-int ,words)))
             (,enabled *interrupts-enabled*)
             ;; As WITH-LOCAL-INTERRUPTS.
             (,allowed *allow-with-interrupts*))
         (declare (type (unsigned-byte 62) ,at))
         (macrolet ((interruptible (&body forms)
                      `(let ((*interrupts-enabled* ,',allowed))
                         (when (and ,',allowed *interrupt-pending*) (sb-unix::receive-pending-interrupt))
                         ,@forms)))
           ;; An interrupt that unwinds from here finds nothing to undo yet.
           (setf *interrupts-enabled* nil)
           (unwind-protect ,body
             ;; CLEANUP may signal: nothing else restores the variable.
             (unwind-protect ,cleanup
               (serving-interrupts ,enabled))))))))

(defun check (result)
  "Signals RESULT if it is a condition, else returns it."
  (if (typep result 'condition) (with-interrupts (error result)) result))

;;; ---- Waiting

(defconstant +slice-ns+ 50000000
  "The longest wait within a call, where no descriptor says that it would succeed: interrupts are served in between.")

(defun seconds-to-ns (seconds)
  (min (ceiling (* seconds 1000000000)) +forever+))

(defun deadline-of (timeout)
  (etypecase timeout
    (null +forever+)
    ((real 0 0) +no-wait+)
    ((real 0) (without-interrupts (%deadline (seconds-to-ns timeout))))))

(defun past-p (deadline)
  (declare (type (signed-byte 64) deadline))
  (or (eql deadline +no-wait+)
      (and (/= deadline +forever+) (<= deadline (without-interrupts (%deadline 0))))))

(defun slice-until (deadline)
  (declare (type (signed-byte 64) deadline))
  (min deadline (without-interrupts (%deadline +slice-ns+))))

(defun poll-milliseconds (fd milliseconds)
  (let ((pollin 1))
    ;; struct pollfd: the descriptor; the events; the returned events.
    (with-words (sap 1)
      (setf (sb-sys:signed-sap-ref-32 sap 0) fd
            (sap-ref-32 sap 4) pollin)
      (%poll sap 1 milliseconds))))

(defun readable-p (fd)
  (eql (poll-milliseconds fd 0) 1))

(defun wait-readable (fd deadline)
  "Sleeps, with interrupts, until FD is readable, or DEADLINE, or an interrupt."
  (declare (type (signed-byte 64) deadline))
  (poll-milliseconds fd (if (eql deadline +forever+)
                            -1
                            ;; The caller begins a longer sleep again.
                            (max 0 (min 1000000 (ceiling (- deadline (without-interrupts (%deadline 0))) 1000000))))))

(defun wait-for (timeout call ready)
  "Makes CALL, a function of a deadline that returns as ATTEMPT, until it does not return PELTON_AGAIN, or until TIMEOUT
has passed. In between calls READY, a function of the deadline that waits and returns as ATTEMPT: a code from 0 on says
that something is there. If that is NIL, CALL waits in the library. Interrupts are served all the time."
  (declare (type function call) (type (or null function) ready) (dynamic-extent call ready))
  (let ((deadline (deadline-of timeout)) (in-library (null ready))
        ;; A past deadline does not wait either, but reports a wait without end, which PELTON_NO_WAIT does not.
        (soon 1))
    (loop
      (let ((result (funcall call (if in-library (slice-until deadline) (shiftf soon +no-wait+)))))
        (unless (eql result +again+)
          (return result)))
      (when (past-p deadline)
        (return (funcall call +no-wait+)))
      (when ready
        (let ((found (funcall ready deadline)))
          (unless (typep found 'fixnum)
            (return found))
          ;; Something is there. If it is not what CALL wants, the descriptor says nothing more, and CALL waits.
          (setf in-library (>= found 0)))))))

(defmacro wait-until-ready ((kind address spins deadline &rest size) wrap)
  "Busy-polls a handle of KIND as the library does, then sleeps until its descriptor is readable. SPINS: it never
sleeps. WRAP is a macro for each call."
  (flet ((function-of (verb) (name "%~a-~a" kind verb)))
    `(let ((polled (,wrap (,(function-of 'poll) ,address ,@size))))
       (if (or ,spins (not (eql polled +again+)))
           polled
           (without-interrupts
             (unwind-protect
                  (let ((armed (,wrap (,(function-of 'arm) ,address ,@size))))
                    (cond ((eql armed +ok+)
                           (with-local-interrupts (wait-readable (,(function-of 'fd) ,address) ,deadline))
                           +again+)
                          (t armed)))
               (,(function-of 'disarm) ,address)))))))

(defmacro attempt-waiting ((kind address timeout deadline &key spins size tried handle) call)
  "As ATTEMPT; waits up to TIMEOUT seconds. CALL, with DEADLINE bound, is made again and again. KIND is the kind of the
handle at ADDRESS, or NIL if it has no descriptor to wait on; a sender waits for space for SIZE bytes. TRIED is a
variable with the result of a CALL that was already made: a condition is the result once, because the library may report
it only once. If HANDLE's peer has died, that is noted until PERSIST signals it, and the result is NIL."
  (let ((result (gensym "RESULT")) (seconds (gensym "SECONDS")))
    `(macrolet ((attempt-noting (call)
                  ,(if handle
                       `(list 'without-interrupts (list 'note ',handle (list 'result call)))
                       `(list 'attempt call))))
       (let* ((,seconds ,timeout)
              (,result ,(let ((first `(let ((,deadline +no-wait+)) (attempt-noting ,call))))
                          (if tried `(if (typep ,tried 'condition) (shiftf ,tried nil) ,first) first))))
         (if (and (eql ,result +again+) (not (eql ,seconds 0)))
             (flet ((call (,deadline) (declare (type (signed-byte 64) ,deadline)) (attempt-noting ,call))
                    ,@(when kind
                        `((ready (deadline)
                            (wait-until-ready (,kind ,address ,spins deadline ,@(when size (list size)))
                                              attempt-noting)))))
               (declare (dynamic-extent #'call ,@(when kind '(#'ready))))
               (wait-for ,seconds #'call ,(when kind '#'ready)))
             ,result)))))

(defun native (path)
  "The kernel's name of a file. A string is taken as it is: it may have characters that mean something to Lisp."
  (if (pathnamep path) (sb-ext:native-namestring path) path))

(defmacro with-path ((word path) &body body)
  "Runs BODY with WORD, the address of the name of PATH for C, or 0 for NIL."
  (let ((octets (gensym "OCTETS")) (given (gensym "PATH")))
    `(let* ((,given ,path) (,octets (utf-8 (if ,given (native ,given) ""))))
       (with-pinned-objects (,octets)
         (let ((,word (if ,given (sap-int (vector-sap ,octets)) 0))) ,@body)))))
