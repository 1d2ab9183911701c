;;;; Plain assertions, counted. A test is a function named by its claim. Each wait has an upper bound, so that nothing
;;;; hangs.

(defpackage #:pelton-tests
  (:use #:cl)
  (:import-from #:pelton #:octets #:make-octets)
  (:import-from #:sb-sys #:sap-ref-8 #:sap-ref-64)
  (:export #:run))

(in-package #:pelton-tests)

(defvar *tests* '() "The names of the tests, the last one first.")
(declaim (type cons *assertions*))
(sb-ext:defglobal *assertions* (list 0))
(defvar *directory* nil "The directory of the running test.")

(defparameter *limit* 60 "Seconds: the bound of each wait.")

(defvar *inside* nil "Whether an interrupt may throw to OUT.")

(define-condition failed (error)
  ((form :initarg :form) (found :initarg :found))
  (:report (lambda (condition stream)
             (format stream "~s~@[, found ~s~]" (slot-value condition 'form) (slot-value condition 'found)))))

(defmacro deftest (name &body body)
  `(progn (defun ,name () ,@body)
          (pushnew ',name *tests*)))

(defmacro is (form)
  "Counts, and fails unless FORM is true; for a call with the values of its arguments."
  (if (and (consp form) (symbolp (first form)) (fboundp (first form)) (not (macro-function (first form)))
           (not (special-operator-p (first form))))
      (let ((arguments (loop for nil in (rest form) collect (gensym))))
        `(let ,(mapcar #'list arguments (rest form))
           (is-true (,(first form) ,@arguments) ',form (list ,@arguments))))
      `(is-true ,form ',form nil)))

(defun is-true (value form found)
  (sb-ext:atomic-incf (car *assertions*))
  (unless value (error 'failed :form form :found found))
  value)

(defmacro signals (type &body body)
  "Counts, and fails unless BODY signals that; returns the condition."
  `(is-true (block nil
              (handler-case (progn ,@body nil)
                (,type (condition) (return condition))))
            '(signals ,type ,@body) nil))

(defun bytes (string)
  (sb-ext:string-to-octets string :external-format :utf-8))

(defun text (octets)
  (sb-ext:octets-to-string octets :external-format :utf-8))

(defun number-octets (number &optional (size 8))
  (let ((octets (make-array size :element-type '(unsigned-byte 8) :initial-element 0)))
    (setf (sb-kernel:%vector-raw-bits octets 0) number)
    octets))

(defun in-directory (name)
  (concatenate 'string *directory* name))

(defmacro in-thread (&body body)
  "A thread that runs BODY; JOINED returns its value, or signals its error."
  `(sb-thread:make-thread (lambda ()
                            (handler-case (progn ,@body)
                              (error (condition) condition)))))

(defun joined (thread)
  (let ((value (sb-thread:join-thread thread :timeout *limit*)))
    (if (typep value 'error) (error value) value)))

(defun disturb (thread ended function)
  "Interrupts THREAD with FUNCTION until ENDED returns true, one interrupt at a time: SBCL queues at most 8."
  (let ((served (sb-thread:make-semaphore)))
    (loop until (funcall ended)
          do (handler-case (sb-thread:interrupt-thread thread (lambda ()
                                                                (sb-thread:signal-semaphore served)
                                                                (funcall function)))
               (sb-thread:interrupt-thread-error () (return)))
             (loop until (or (funcall ended) (sb-thread:wait-on-semaphore served :timeout 0.1)))
             (sleep 0.0002))))

(defmacro with-an-interrupt-pending (&body body)
  "Runs BODY with a pending interrupt that unwinds as soon as it is served. Counts, and fails unless it was served."
  `(is (eq :unwound
           (catch 'pending
             (sb-sys:without-interrupts
               (let ((thread sb-thread:*current-thread*))
                 (joined (in-thread (sb-thread:interrupt-thread thread (lambda () (throw 'pending :unwound))))))
               (sb-sys:allow-with-interrupts ,@body)
               nil)))))

(defun call-interrupted-at-adoption (function)
  "Calls FUNCTION, which is interrupted when it has opened a handle and not yet bound it. True if that unwound."
  (let ((thread sb-thread:*current-thread*) (done nil))
    (eq :unwound
        (catch 'opened
          (sb-int:encapsulate 'pelton::adopt 'interrupted
                              (lambda (adopt handle)
                                (when (and (eq sb-thread:*current-thread* thread) (not done)
                                           (not (typep handle 'pelton::listener)))
                                  (setf done t)
                                  (joined (in-thread (sb-thread:interrupt-thread thread (lambda () (throw 'opened :unwound))))))
                                (funcall adopt handle)))
          (unwind-protect (funcall function)
            (sb-int:unencapsulate 'pelton::adopt 'interrupted))))))

(defmacro until (form)
  "Waits until FORM is true, and returns it."
  `(loop with end = (+ (get-universal-time) *limit*)
         for found = ,form
         until found
         do (when (> (get-universal-time) end) (error 'failed :form '(until ,form) :found nil))
            (sleep 0.01)
         finally (return (is-true found ',form nil))))

(defun run ()
  "Runs all tests; the last line of the output has their number. True if all passed."
  (let ((failures 0) (tests (reverse *tests*)))
    (dolist (test tests)
      (setf *directory* (sb-posix:mkdtemp (format nil "~a/pelton-lisp-XXXXXX" (or (sb-posix:getenv "TMPDIR") "/tmp"))))
      (setf *directory* (concatenate 'string *directory* "/"))
      (unwind-protect
           (handler-case (sb-ext:with-timeout (* 3 *limit*) (funcall test))
             ((or error sb-ext:timeout) (condition)
               (incf failures)
               (format t "lisp: ~(~a~) failed: ~a~%" test condition)))
        (sb-ext:delete-directory *directory* :recursive t)))
    (format t "lisp: ~d tests~[~:; of which ~:*~d failed~], ~d assertions~%" (length tests) failures (car *assertions*))
    (zerop failures)))
